/* The text of a thread's last error. */
#include <stdarg.h>
#include <stdio.h>

#include "base/crc32c.h"
#include "base/error.h"

static _Thread_local char text[512];

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    return -code;
}

int need(uint64_t count, ...) {
    const char *name, *missing = NULL;
    va_list arguments;
    if (!count) return 0;
    va_start(arguments, count);
    while (!missing && (name = va_arg(arguments, const char *)))
        if (!va_arg(arguments, const void *)) missing = name;
    va_end(arguments);
    if (!missing) return 0;
    return fail(CXLKV_E_ARGUMENT, "%s: no address (NULL), %lu wanted", missing, count);
}

const char *cxlkv_error_text(void) { return text; }

uint32_t cxlkv_abi(void) { return CXLKV_ABI; }

const char *cxlkv_version(void) { return CXLKV_VERSION; }

uint32_t cxlkv_crc32c(uint32_t crc, const void *data, size_t bytes) {
    return crc32c(crc, data, bytes);
}
