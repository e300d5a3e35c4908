/* The text of a thread's last error. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "pool/internal.h"

static _Thread_local char text[512];

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    return -code;
}

const char *cxlkv_error_text(void) { return text; }

uint32_t cxlkv_abi(void) { return CXLKV_ABI; }

const char *cxlkv_version(void) { return "0.2.0"; }

int cxlkv_isa_force(const char *name) {
    int code = kernels_force(name);
    if (code == -ENOTSUP) return fail(ENOTSUP, "this CPU, or this build, has no %s", name);
    if (code < 0)
        return fail(CXLKV_E_ARGUMENT, "no instruction set is called %s: serial, avx2, avx512, "
                    "avx512_bf16, amx, neon, neon_bf16 or auto", name);
    return 0;
}

const char *cxlkv_isa_name(void) { return kernels_current()->name; }

uint32_t cxlkv_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return crc32c(crc, data, bytes);
}
