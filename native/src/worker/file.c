/* The file with the slots of the worker and its clients; types.h says what holds. */
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/flush.h"
#include "coherence/rpc.h"
#include "format/state_folder.h"
#include "host/processes.h"
#include "region/region.h"
#include "worker/file.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const uint8_t magic[8] = {'C', 'X', 'L', 'K', 'V', 'W', 'R', 'K'};

/* Beside the pool's host state, in the folder that the pool has open. */
static state_place place_of(const cxlkv_pool *pool) {
    state_place place = pool->state;
    state_place_worker(&place);
    return place;
}

static uint32_t header_crc(const worker_header *header) {
    return crc32c(0, header, offsetof(worker_header, crc));
}

static uint64_t file_bytes(const worker_header *header) {
    return WORKER_SLOTS + header->slot_count * header->slot_stride;
}

uint8_t *worker_slot(const worker_file *file, uint32_t slot) {
    return file->base + WORKER_SLOTS + slot * file->header.slot_stride;
}

static uint8_t *claim_line(const worker_file *file, uint32_t slot) {
    return file->base + WORKER_CLAIMS + slot * LINE_BYTES;
}

bool worker_lives(const worker_file *file) {
    return !byte_is_free(file->fd, USE_BYTE) && !process_is_dead(&file->header.worker);
}

void worker_file_close(worker_file *file) {
    if (file->base) munmap(file->base, file->bytes);
    if (file->fd >= 0) close(file->fd);
    file->base = NULL;
    file->fd = -1;
}

/* ---- the worker's side ---- */

static int file_map(worker_file *file, const char *path) {
    file->bytes = file_bytes(&file->header);
    void *base = mmap(NULL, file->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
    if (base == MAP_FAILED)
        return fail(errno, "%s: cannot map: %s%s", path, strerror(errno), remedy_of(errno));
    file->base = base;
    return 0;
}

/* It gets its name when it is whole and its lock is taken. */
static int file_fill(worker_file *file, const state_place *place) {
    const char *path = place->path;
    file->fd = state_file_make(place);
    if (file->fd < 0) return file->fd;
    int code = posix_fallocate(file->fd, 0, (off_t)file_bytes(&file->header));
    if (code)
        return fail(code, "%s: cannot reserve %lu KiB: %s. Ask for fewer slots, or make /dev/shm "
                    "larger", path, file_bytes(&file->header) >> 10, strerror(code));
    code = file_map(file, path);
    if (code < 0) return code;
    memcpy(file->base, &file->header, sizeof(file->header));
    code = lock_byte(file->fd, USE_BYTE, true, false);
    if (code < 0) return byte_lock_error(code, path);
    state_file_unlink(place);
    return state_file_show(place, file->fd);
}

static int file_make_alone(const cxlkv_pool *pool, worker_file *file) {
    state_place place = place_of(pool);
    worker_file old = {.fd = -1};
    int code = 0;
    if (worker_file_open(pool, &old) == 0)
        code = fail(CXLKV_E_BUSY, "%s has a worker already: process %d", pool->path,
                    old.header.worker.pid);
    worker_file_close(&old);
    return code < 0 ? code : file_fill(file, &place);
}

int worker_file_make(const cxlkv_pool *pool, uint32_t slots, uint32_t request_bytes,
                     uint32_t response_bytes, enum visibility_mode mode, worker_file *file) {
    *file = (worker_file){.fd = -1};
    if (!pool->path)
        return fail(CXLKV_E_ARGUMENT, "an anonymous pool has no other processes: a worker needs "
                    "one in a file or on a device");
    if (slots == 0 || slots > WORKER_SLOTS_MAX || request_bytes < 4096 ||
        request_bytes > RPC_BYTES_MAX || response_bytes < 4096 || response_bytes > RPC_BYTES_MAX ||
        request_bytes % LINE_BYTES)
        return fail(CXLKV_E_ARGUMENT, "%u slots of %u and %u bytes: 1 to %d, whole lines, 4096 to "
                    "%d", slots, request_bytes, response_bytes, WORKER_SLOTS_MAX, RPC_BYTES_MAX);
    worker_header *header = &file->header;
    *header = (worker_header){.version = WORKER_VERSION, .slot_count = slots, .mode = mode,
                              .request_bytes = request_bytes, .response_bytes = response_bytes};
    header->slot_stride = rpc_slot_bytes(request_bytes, response_bytes);
    memcpy(header->magic, magic, sizeof(magic));
    memcpy(header->identity, pool->identity, sizeof(header->identity));
    process_identify(&header->worker);
    header->worker.state = 1;
    header->crc = header_crc(header);
    int code = lock_byte(pool->region.fd, ATTACH_BYTE, true, true); /* one worker at a time looks */
    if (code < 0) return byte_lock_error(code, pool->path);
    code = file_make_alone(pool, file);
    unlock_byte(pool->region.fd, ATTACH_BYTE);
    if (code < 0) worker_file_close(file);
    return code;
}

void worker_file_remove(const cxlkv_pool *pool, worker_file *file) {
    if (file->fd < 0) return; /* none was made: an anonymous pool does not even have a place */
    state_place place = place_of(pool);
    if (state_file_is(&place, file->fd)) state_file_unlink(&place);
    worker_file_close(file);
}

void worker_sleep(const worker_file *file, uint64_t pause_ns, bool (*again)(void *context),
                  void *context) {
    const struct timespec pause = timespec_of(pause_ns);
    atomic_uint *bell = (atomic_uint *)(file->base + WORKER_BELL);
    uint32_t before = atomic_load(bell);
    flush_store_word(file->base + WORKER_SLEEPS, 1);
    flush_fence_all(FLUSH_LOCAL); /* pairs with the one in worker_ring() */
    if (!again(context)) syscall(SYS_futex, bell, FUTEX_WAIT, before, &pause, NULL, 0);
    flush_store_word(file->base + WORKER_SLEEPS, 0);
}

/* ---- a client's side ---- */

static int file_check(const cxlkv_pool *pool, worker_file *file, const char *path) {
    const worker_header *header = &file->header;
    struct stat status;
    if (pread(file->fd, &file->header, sizeof(file->header), 0) != sizeof(file->header) ||
        memcmp(header->magic, magic, sizeof(magic)) != 0 || header->crc != header_crc(header) ||
        fstat(file->fd, &status) < 0)
        return fail(CXLKV_E_WORKER, "%s is not a worker's file", path);
    if (header->version != WORKER_VERSION || header->mode > VISIBILITY_STRICT)
        return fail(CXLKV_E_WORKER, "%s: the worker is of another version", path);
    if (memcmp(header->identity, pool->identity, sizeof(header->identity)) != 0 ||
        header->slot_count > WORKER_SLOTS_MAX || header->request_bytes > RPC_BYTES_MAX ||
        header->request_bytes < 4096 || header->response_bytes > RPC_BYTES_MAX ||
        header->response_bytes < 4096 ||
        header->slot_stride != rpc_slot_bytes(header->request_bytes, header->response_bytes) ||
        (uint64_t)status.st_size != file_bytes(header))
        return fail(CXLKV_E_WORKER, "%s does not fit the pool", path);
    if (!worker_lives(file))
        return fail(CXLKV_E_WORKER, "the worker of this pool, process %d, is dead: start it anew",
                    header->worker.pid);
    return file_map(file, path);
}

int worker_file_open(const cxlkv_pool *pool, worker_file *file) {
    *file = (worker_file){.fd = -1};
    state_place place = {.folder = -1};
    if (pool->path) place = place_of(pool);
    int code = state_file_open(&place, O_RDWR);
    if (code == -ENOENT)
        code = fail(CXLKV_E_WORKER, "this pool has no worker: start one with "
                    "`cxlkv ndp-worker %s`", pool->path ? pool->path : "FILE");
    else if (code >= 0) {
        file->fd = code;
        code = file_check(pool, file, place.path);
    }
    if (code < 0) worker_file_close(file);
    return code;
}

int worker_claim(const worker_file *file, uint32_t *slot) {
    for (uint32_t i = 0; i < file->header.slot_count; i++) {
        if (lock_byte(file->fd, CLAIM_BYTE + i, true, false) < 0) continue;
        process_slot own = {.state = 1};
        process_identify(&own);
        uint8_t *line = claim_line(file, i);
        flush_store_word(line + offsetof(process_slot, nonce), 0);
        for (size_t at = 0; at < offsetof(process_slot, nonce); at += 8) {
            uint64_t word;
            memcpy(&word, (uint8_t *)&own + at, 8);
            flush_store_word(line + at, word);
        }
        flush_store_word(line + offsetof(process_slot, nonce), own.nonce ? own.nonce : 1);
        *slot = i;
        return 0;
    }
    return fail(CXLKV_E_WORKER, "all %u slots of the worker, process %d, are taken: start it with "
                "more --slots", file->header.slot_count, file->header.worker.pid);
}

void worker_unclaim(const worker_file *file, uint32_t slot) {
    flush_store_word(claim_line(file, slot) + offsetof(process_slot, nonce), 0);
    unlock_byte(file->fd, CLAIM_BYTE + slot);
}

uint64_t worker_claim_nonce(const worker_file *file, uint32_t slot) {
    return flush_load_word(claim_line(file, slot) + offsetof(process_slot, nonce));
}

bool worker_claim_is_dead(const worker_file *file, uint32_t slot) {
    uint64_t line[8];
    process_slot claimed;
    if (byte_is_free(file->fd, CLAIM_BYTE + slot)) return true;
    flush_load_line(line, claim_line(file, slot));
    memcpy(&claimed, line, sizeof(claimed));
    return process_is_dead(&claimed); /* its lock may live on in a child */
}

void worker_ring(const worker_file *file) {
    flush_fence_all(FLUSH_LOCAL); /* the request is there before we look whether it sleeps */
    if (!flush_load_word(file->base + WORKER_SLEEPS)) return;
    atomic_fetch_add((atomic_uint *)(file->base + WORKER_BELL), 1);
    syscall(SYS_futex, file->base + WORKER_BELL, FUTEX_WAKE, 1, NULL, NULL, 0);
}
