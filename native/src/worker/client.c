/* A process's end of the worker: the connection, and what it was told, in bounded time.
 *
 * Tables: the worker holds pages for this process, and is told of new ones before a call, and of
 * those that a release or a truncate drops, at once. Whatever goes wrong (no worker, a dead, slow
 * or full one, a refusal), the connection's epoch ends where it must, and the call is done here.
 * A worker that comes back is found within RETRY_NS, and told everything anew. */
#include "base/clock.h"
#include "coherence/rpc.h"
#include "host/locks.h"
#include "worker/client.h"
#include "worker/file.h"
#include "worker/request.h"

#include <math.h>
#include <time.h>

enum { ERROR_CODE_MAX = 4095 };
/* An answer is due after this time and what 500 MB/s would take. */
#define DEADLINE_S 0.05
#define DEADLINE_BYTES_S 5e8

/* ---- the connection ---- */

static void disconnect(worker_client *c, bool unclaims) {
    if (c->connected && unclaims) worker_unclaim(&c->file, c->slot_index);
    worker_file_close(&c->file);
    free(c->request);
    free(c->response);
    free(c->part);
    c->request = c->response = c->part = NULL;
    c->connected = false;
    c->state.connected = 0;
    c->epoch++;
    c->next_table = 0;
}

int client_lost(worker_client *c, int code, uint64_t retry_ns) {
    disconnect(c, true);
    c->retry_ns = boottime_ns() + retry_ns;
    return code;
}

static int connect_slot(worker_client *c) {
    const worker_header *header = &c->file.header;
    c->slot = (rpc_slot){.mode = (enum visibility_mode)header->mode, .same_host = true};
    c->request = malloc(header->request_bytes);
    c->response = malloc(header->response_bytes);
    c->request_capacity = header->request_bytes;
    if (!c->request || !c->response) return fail(ENOMEM, "no memory for calls of the worker");
    int code = worker_claim(&c->file, &c->slot_index);
    if (code < 0) return code;
    code = rpc_client(&c->slot, worker_slot(&c->file, c->slot_index), header->request_bytes,
                      header->response_bytes);
    if (code < 0) worker_unclaim(&c->file, c->slot_index);
    return code;
}

int client_connect(cxlkv_pool *pool, worker_client *c) {
    uint64_t now = boottime_ns();
    if (now < c->retry_ns)
        return fail(CXLKV_E_WORKER, "the worker is left alone for %lu ms, since: %s",
                    (c->retry_ns - now) / 1000000 + 1, c->state.why);
    int code = worker_file_open(pool, &c->file);
    if (code == 0) code = connect_slot(c);
    if (code < 0) return client_lost(c, code, RETRY_NS);
    c->connected = true;
    atomic_store(&c->untold, false);
    c->state.connected = 1;
    c->state.connections++;
    c->state.pid = c->file.header.worker.pid;
    c->state.slots = c->file.header.slot_count;
    return 0;
}

/* Waits for the answer, until the deadline or the worker's death. */
static int64_t await(worker_client *c, uint64_t deadline_ns) {
    for (uint64_t slice_ns = 1000000;; slice_ns = min_u64(2 * slice_ns, 16000000)) {
        uint64_t now = boottime_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
        int64_t code = rpc_await(&c->slot, c->response, (double)min_u64(slice_ns, left) * 1e-9);
        if (code != -CXLKV_E_TIMEOUT) return code;
        if (!worker_lives(&c->file))
            return client_lost(c, fail(CXLKV_E_WORKER, "the worker, process %d, died during a "
                                       "call", c->file.header.worker.pid), 0);
        if (boottime_ns() >= deadline_ns)
            return client_lost(c, fail(CXLKV_E_WORKER, "the worker, process %d, lives and did not "
                                       "answer in time: it is overloaded or stopped",
                                       c->file.header.worker.pid), SLOW_RETRY_NS);
    }
}

int client_reserve(worker_client *c, uint64_t bytes) {
    if (bytes <= c->request_capacity) return 0;
    uint8_t *made = malloc(bytes);
    if (!made) return fail(ENOMEM, "no memory for a request of %lu bytes", bytes);
    free(c->request);
    c->request = made;
    c->request_capacity = bytes;
    return 0;
}

/* One that has room in a slot. */
static int ask_once(worker_client *c, uint32_t operation, const uint8_t *request, uint64_t bytes,
                    uint64_t deadline_ns, answer_head *head, uint64_t *length) {
    c->state.requests++;
    int64_t code = rpc_send(&c->slot, operation, request, (uint32_t)bytes);
    if (code < 0) return (int)code;
    worker_ring(&c->file);
    code = await(c, deadline_ns);
    if (code < 0 && !c->connected) return (int)code;
    if (code < 0) return client_lost(c, (int)code, RETRY_NS);
    if ((uint64_t)code < sizeof(*head))
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker's answer has %ld bytes",
                                   (long)code), RETRY_NS);
    memcpy(head, c->response, sizeof(*head));
    if (head->code < -ERROR_CODE_MAX)
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker answered with code %d, which is "
                                   "none", head->code), RETRY_NS);
    *length = (uint64_t)code - sizeof(*head);
    if (head->code >= 0) return 0;
    c->state.refused += head->code != -CXLKV_E_BUSY;
    return fail(-head->code, "%.*s", (int)min_u64(*length, 500),
                (const char *)c->response + sizeof(*head));
}

/* All bytes of a long request. */
static int send_parts(worker_client *c, uint64_t bytes, uint64_t deadline_ns) {
    uint64_t before = sizeof(request_head) + sizeof(request_part);
    uint64_t slot = c->file.header.request_bytes;
    if (!c->part && !(c->part = malloc(slot)))
        return fail(ENOMEM, "no memory for a part of a request");
    for (request_part part = {0}; part.offset < bytes;) {
        uint64_t length = min_u64(bytes - part.offset, slot - before), answered;
        request_head head = {REQUEST_MAGIC, REQUEST_PART, (uint32_t)(before + length), 0};
        answer_head got;
        memcpy(c->part, &head, sizeof(head));
        memcpy(c->part + sizeof(head), &part, sizeof(part));
        memcpy(c->part + before, c->request + part.offset, length);
        int code = ask_once(c, REQUEST_PART, c->part, before + length, deadline_ns, &got,
                            &answered);
        if (code < 0) return code;
        part.offset += length;
    }
    return 0;
}

int client_ask(worker_client *c, uint32_t operation, uint32_t count, uint64_t bytes,
               uint64_t deadline_ns, answer_head *head, uint64_t *length) {
    request_head request = {REQUEST_MAGIC, operation, (uint32_t)bytes, count};
    memcpy(c->request, &request, sizeof(request));
    bool is_long = bytes > c->file.header.request_bytes;
    int code = is_long ? send_parts(c, bytes, deadline_ns) : 0;
    if (code < 0) return code;
    return ask_once(c, operation, c->request, is_long ? sizeof(request) : bytes, deadline_ns, head,
                    length);
}

uint64_t client_deadline(const worker_client *c, double work_bytes) {
    double seconds = c->deadline_s > 0 ? c->deadline_s : DEADLINE_S + work_bytes / DEADLINE_BYTES_S;
    return boottime_ns() + (uint64_t)(fmin(seconds, 3600) * 1e9);
}

int client_lock(worker_client *c, uint64_t deadline_ns) {
    uint64_t now = boottime_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
    if (pthread_mutex_trylock(&c->lock) == 0) return 0;
    if (mutex_lock_until(&c->lock, monotonic_ns() + left) == 0) return 0;
    return fail(CXLKV_E_WORKER, "other threads' calls of the worker take too long");
}

/* ---- tables ---- */

int client_forget(worker_client *c, uint64_t deadline_ns) {
    answer_head head;
    uint64_t length;
    int code = client_ask(c, REQUEST_LEAVE, 0, sizeof(request_head), deadline_ns, &head, &length);
    if (!c->connected) return code;
    c->epoch++;
    c->next_table = 0;
    atomic_store(&c->untold, false);
    return code;
}

static void tails_untold(cxlkv_sequence *sequence, uint32_t part) {
    const cxlkv_pool *pool = sequence->pool;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        if (pool->layers.part_of[layer] == part) sequence->worker_tails[layer] = (worker_tail){0};
}

/* False when the worker knows all complete pages of the layer. */
static bool change_of(worker_client *c, cxlkv_sequence *sequence, uint32_t part, uint32_t layer,
                      request_table *change) {
    const worker_table *known = &sequence->worker_tables[part];
    uint64_t complete = sequence->layer_tokens[layer] / sequence->pool->layout.page_tokens;
    uint32_t first = sequence->tables[part].first, end = (uint32_t)complete;
    bool told = known->epoch == c->epoch;
    if (!told) tails_untold(sequence, part);
    if (end < first) end = first;
    *change = (request_table){.table = told ? known->table : c->next_table, .part = part,
                              .to = c->next_version + 1, .first = first, .kept = first};
    if (told && known->first == first) {
        change->from = known->version;
        change->kept = known->end;
        if (known->end >= end) return false;
    }
    change->added = end - change->kept;
    c->next_version++;
    if (!told) c->next_table++;
    return true;
}

static uint8_t *put_entries(const cxlkv_sequence *sequence, const request_table *change,
                            uint8_t *to) {
    for (uint32_t i = 0; i < change->added; i++, to += REQUEST_ENTRY_BYTES) {
        uint32_t page = sequence_page(sequence, change->part, change->kept + i);
        memcpy(to, &sequence->pool->pages[page].generation, 8);
        memcpy(to + 8, &page, 4);
    }
    return to;
}

static int tell_some(worker_client *c, cxlkv_sequence **sequences, const request_table *changes,
                     uint32_t count, uint64_t deadline_ns) {
    uint8_t *at = c->request + sizeof(request_head);
    answer_head head;
    uint64_t length;
    memcpy(at, changes, count * sizeof(*changes));
    at += count * sizeof(*changes);
    for (uint32_t i = 0; i < count; i++) at = put_entries(sequences[i], &changes[i], at);
    while ((at - c->request) % 8) *at++ = 0;
    int code = client_ask(c, REQUEST_TABLES, count, (uint64_t)(at - c->request), deadline_ns, &head,
                   &length);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        const request_table *told = &changes[i];
        sequences[i]->worker_tables[told->part] = (worker_table){
            .epoch = told->to ? c->epoch : 0, .table = told->table, .version = told->to,
            .first = told->first, .end = told->kept + told->added};
    }
    return code;
}

/* In as few requests as have room. */
int client_tell(worker_client *c, cxlkv_batch *batch, uint32_t layer, uint64_t deadline_ns) {
    enum { CHANGES = 64 };
    uint32_t part = batch->pool->layers.part_of[layer], next = 0;
    while (next < batch->count) {
        request_table changes[CHANGES];
        cxlkv_sequence *whose[CHANGES];
        uint32_t count = 0;
        uint64_t room = c->file.header.request_bytes - sizeof(request_head) - 8;
        for (; next < batch->count && count < CHANGES; next++) {
            request_table *change = &changes[count];
            uint64_t needed = sizeof(*change) + REQUEST_ENTRY_BYTES;
            if (room < needed) break;
            if (!change_of(c, batch->sequences[next], part, layer, change)) continue;
            uint64_t fits = (room - sizeof(*change)) / REQUEST_ENTRY_BYTES;
            bool cut = change->added > fits;
            if (cut) change->added = (uint32_t)fits;
            room -= sizeof(*change) + change->added * REQUEST_ENTRY_BYTES;
            whose[count++] = batch->sequences[next];
            if (cut) break; /* the rest of it in the next request */
        }
        int code = count ? tell_some(c, whose, changes, count, deadline_ns) : 0;
        if (code < 0) return code;
    }
    return 0;
}

/* Of each part that the worker knows: pages from `end` on go; end 0: all of it. */
void worker_keep(cxlkv_sequence *sequence, uint32_t end) {
    cxlkv_pool *pool = sequence->pool;
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    if (!c || !sequence->worker_tables) return;
    uint64_t deadline_ns = client_deadline(c, 0);
    if (client_lock(c, deadline_ns) < 0) {
        atomic_store(&c->untold, true);
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            sequence->worker_tables[part].epoch = 0;
        return;
    }
    int code = 0;
    for (uint32_t part = 0; code == 0 && part < pool->geometry.part_count; part++) {
        worker_table *known = &sequence->worker_tables[part];
        request_table change = {.table = known->table, .part = part};
        if (!c->connected || known->epoch != c->epoch || (end && known->end <= end)) continue;
        if (end > known->first) {
            change = (request_table){.table = known->table, .part = part, .from = known->version,
                                     .to = ++c->next_version, .first = known->first, .kept = end};
        }
        code = tell_some(c, &sequence, &change, 1, deadline_ns);
    }
    if (code < 0 && c->connected)
        client_lost(c, code, RETRY_NS); /* so all is dropped for certain */
    pthread_mutex_unlock(&c->lock);
}

void worker_give_back(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    uint64_t deadline_ns = c ? client_deadline(c, 0) : 0;
    if (!c || client_lock(c, deadline_ns) < 0) return;
    if (c->connected && c->next_table) client_forget(c, deadline_ns);
    pthread_mutex_unlock(&c->lock);
}

/* ---- beginning and end ---- */

static worker_client *client_make(void) {
    worker_client *made = calloc(1, sizeof(*made));
    if (!made) return NULL;
    pthread_mutex_init(&made->lock, NULL);
    made->file.fd = -1;
    made->epoch = 1;
    return made;
}

int client_use(cxlkv_pool *pool, uint32_t use, double deadline_s) {
    if (use > CXLKV_WORKER_ONLY || !(deadline_s >= 0))
        return fail(CXLKV_E_ARGUMENT, "worker: use %u within %g s", use, deadline_s);
    if (!pool->path)
        return fail(CXLKV_E_ARGUMENT, "an anonymous pool has no other processes: no worker can "
                    "open it");
    int code = pool_enter(pool);
    if (code < 0) return code;
    pthread_mutex_lock(&pool->locks.list);
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    if (!c) c = client_make();
    if (c) atomic_store(&pool->owner[OWNER_WORKER], c);
    else code = fail(ENOMEM, "no memory for a worker's client");
    pthread_mutex_unlock(&pool->locks.list);
    if (c) {
        pthread_mutex_lock(&c->lock);
        c->deadline_s = deadline_s;
        c->retry_ns = 0;
        atomic_store(&c->use, use);
        if (use == CXLKV_WORKER_NONE && c->connected) {
            client_forget(c, client_deadline(c, 0));
            disconnect(c, true);
        } else if (use != CXLKV_WORKER_NONE && !c->connected) {
            int found = client_connect(pool, c);
            if (found < 0) snprintf(c->state.why, sizeof(c->state.why), "%s", cxlkv_error_text());
            if (use == CXLKV_WORKER_ONLY) code = found;
        }
        pthread_mutex_unlock(&c->lock);
    }
    pool_leave(pool);
    return code;
}

void worker_use_state(cxlkv_pool *pool, cxlkv_worker_state *state) {
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    *state = (cxlkv_worker_state){0};
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    *state = c->state;
    pthread_mutex_unlock(&c->lock);
}

void worker_forked(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    if (!c) return;
    pthread_mutex_init(&c->lock, NULL);
    disconnect(c, false);
    c->retry_ns = 0;
}

void worker_leave(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    if (c->connected) client_forget(c, client_deadline(c, 0));
    disconnect(c, true);
    atomic_store(&c->use, CXLKV_WORKER_NONE);
    pthread_mutex_unlock(&c->lock);
}

void worker_client_drop(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->owner[OWNER_WORKER]);
    if (!c) return;
    pthread_mutex_destroy(&c->lock);
    free(c->result);
    free(c);
}
