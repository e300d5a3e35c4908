/* A CUDA driver for tests: it keeps the rules of the real one that matter here, records calls, and
 * fails when it is told to. BATCH: 0 no batched copies, 1 those of 12.8, 2 those of 13. */
#include <stdio.h>
#include <stdint.h>
#include <string.h>

#ifndef BATCH
#define BATCH 2
#endif

enum { RANGES_MAX = 256, LOG_BYTES = 1 << 16, DEVICES = 2 };
enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
};

typedef struct range {
    uint64_t address, bytes;
} range;

static range ranges[RANGES_MAX];
static int range_count, device_count = DEVICES;
static char calls[LOG_BYTES];
static char failing[64];
static int failing_code, failing_skip;
static uint64_t register_most = UINT64_MAX, shift;
static _Thread_local uintptr_t contexts[8];
static _Thread_local int context_count;

static void note(const char *name, uint64_t a, uint64_t b, uint64_t c) {
    size_t used = strlen(calls);
    snprintf(calls + used, sizeof(calls) - used, "%s %lu %lu %lu\n", name, a, b, c);
}

static int told(const char *name) {
    if (strcmp(name, failing) != 0) return SUCCESS;
    if (failing_skip-- > 0) return SUCCESS;
    failing[0] = 0;
    return failing_code;
}

/* ---- for the test ---- */

const char *fake_calls(void) { return calls; }
void fake_forget(void) { calls[0] = 0; }
int fake_registered(void) { return range_count; }
/* The call with this name, after `skip` more of them, gives `code`; once. */
void fake_fail(const char *name, int code, int skip) {
    snprintf(failing, sizeof(failing), "%s", name);
    failing_code = code;
    failing_skip = skip;
}
void fake_register_most(uint64_t bytes) { register_most = bytes; }
/* The device sees host memory so far behind where the host does. */
void fake_shift(uint64_t bytes) { shift = bytes; }
void fake_devices(int count) { device_count = count; }

/* ---- as libcuda.so.1 has them ---- */

int cuInit(unsigned flags) {
    (void)flags;
    return told("cuInit");
}
int cuDriverGetVersion(int *version) {
    *version = BATCH == 2 ? 13000 : BATCH ? 12080 : 12040;
    return SUCCESS;
}
int cuGetErrorName(int code, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (names[i].code == code) {
            *text = names[i].name;
            return SUCCESS;
        }
    *text = NULL;
    return INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) {
    *text = "as the test wanted it";
    return code ? SUCCESS : INVALID_VALUE;
}
int cuDeviceGetCount(int *count) {
    *count = device_count;
    return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal + 100;
    return ordinal < DEVICES ? SUCCESS : 101;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(device * 16);
    note("cuDevicePrimaryCtxRetain", (uint64_t)device, 0, 0);
    return told("cuDevicePrimaryCtxRetain");
}
int cuCtxGetCurrent(void **context) {
    *context = context_count ? (void *)contexts[context_count - 1] : NULL;
    return SUCCESS;
}
int cuCtxPushCurrent_v2(void *context) {
    contexts[context_count++] = (uintptr_t)context;
    return SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!context_count) return INVALID_CONTEXT;
    *context = (void *)contexts[--context_count];
    return SUCCESS;
}
int cuCtxSynchronize(void) {
    note("cuCtxSynchronize", context_count ? contexts[context_count - 1] / 16 : 0, 0, 0);
    return context_count ? told("cuCtxSynchronize") : INVALID_CONTEXT;
}

int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    uint64_t at = (uintptr_t)address;
    note("cuMemHostRegister_v2", at, bytes, flags);
    if (!context_count) return INVALID_CONTEXT;
    int code = told("cuMemHostRegister_v2");
    if (code) return code;
    if (bytes == 0 || range_count == RANGES_MAX) return INVALID_VALUE;
    if (bytes > register_most) return OUT_OF_MEMORY;
    for (int i = 0; i < range_count; i++)
        if (at < ranges[i].address + ranges[i].bytes && ranges[i].address < at + bytes)
            return ALREADY_REGISTERED;
    ranges[range_count++] = (range){at, bytes};
    return SUCCESS;
}

int cuMemHostUnregister(void *address) {
    note("cuMemHostUnregister", (uintptr_t)address, 0, 0);
    if (!context_count) return INVALID_CONTEXT;
    for (int i = 0; i < range_count; i++)
        if (ranges[i].address == (uintptr_t)address) {
            ranges[i] = ranges[--range_count];
            return told("cuMemHostUnregister");
        }
    return NOT_REGISTERED;
}

int cuMemHostGetDevicePointer_v2(uint64_t *device, void *address, unsigned flags) {
    (void)flags;
    int code = told("cuMemHostGetDevicePointer_v2");
    if (code) return code;
    for (int i = 0; i < range_count; i++)
        if ((uintptr_t)address - ranges[i].address < ranges[i].bytes) {
            *device = (uintptr_t)address + shift * (uint64_t)i;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

/* As the real one: a copy lies in one registration, or in none. */
static int lies_right(uint64_t at, uint64_t bytes) {
    for (int i = 0; i < range_count; i++) {
        uint64_t first = ranges[i].address, end = first + ranges[i].bytes;
        if (at < end && first < at + bytes && (at < first || at + bytes > end)) return 0;
    }
    return 1;
}

static int copy_one(uint64_t target, uint64_t source, size_t bytes) {
    if (!context_count) return INVALID_CONTEXT;
    if (!lies_right(target, bytes) || !lies_right(source, bytes)) return INVALID_VALUE;
    memmove((void *)(uintptr_t)target, (void *)(uintptr_t)source, bytes);
    return SUCCESS;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t bytes, void *stream) {
    note("cuMemcpyAsync", bytes, (uintptr_t)stream, 0);
    int code = told("cuMemcpyAsync");
    return code ? code : copy_one(target, source, bytes);
}

#if BATCH
typedef struct location {
    int type, id;
} location;
typedef struct attributes {
    unsigned order;
    location source, target;
    unsigned flags;
} attributes;

static int copy_all(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                    attributes *how, size_t *first, size_t how_count, size_t *failed,
                    void *stream) {
    note("batch", count, (uintptr_t)stream, how_count ? how[0].order : 0);
    int code = told("batch");
    if (code) return code;
    if (!stream || count == 0 || how_count != 1 || first[0] != 0 || how[0].order != 1 ||
        how[0].flags || how[0].source.type || how[0].target.type)
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        code = copy_one(targets[i], sources[i], sizes[i]);
        if (code) {
            if (failed) *failed = i;
            return code;
        }
    }
    return SUCCESS;
}
#endif
#if BATCH == 2
int cuMemcpyBatchAsync_v2(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                          attributes *how, size_t *first, size_t how_count, void *stream) {
    return copy_all(targets, sources, sizes, count, how, first, how_count, NULL, stream);
}
#elif BATCH == 1
int cuMemcpyBatchAsync(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                       attributes *how, size_t *first, size_t how_count, size_t *failed,
                       void *stream) {
    return copy_all(targets, sources, sizes, count, how, first, how_count, failed, stream);
}
#endif
