/* The worker's results have room, and go to the client that asks. */
#pragma once
#include "worker/types.h"

/* Room for so many bytes of a result. */
int server_reserve(buffer *of, uint64_t bytes);
/* Sends the client that asked the result, or the error of a negative code. */
void server_answer(cxlkv_worker *w, int64_t code);
