/* Errors: their codes go up, the text stays with the thread. */
#pragma once
#include "cxlkv.h"

int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The caller's memory is there: CXLKV_E_ARGUMENT where one of these names and addresses, in turn to
 * a NULL, is to have `count` of something and is NULL. */
int need(uint64_t count, ...) __attribute__((sentinel));
