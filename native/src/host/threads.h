/* The pool's threads run tasks. */
#pragma once
#include "format/types.h"

typedef int (*task_function)(void *context, uint32_t item);
/* Runs items 0..count-1 on the pool's threads, each under a SIGBUS guard; the first error wins. */
int run_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context);
/* The same in a model's step: on the threads that multiply its matrices, where there are such. */
int run_step_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context);
void helpers_destroy(helpers *threads);
