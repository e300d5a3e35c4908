/* A step chooses among what earlier ones found. */
#pragma once
#include "ndp/types.h"

/* Takes what the plan's sequence has kept: p->kept, p->narrow and, of a narrow one, p->tasks. */
void kept_begin(select_job *job, plan *p);
/* By what the select came to. */
void kept_end(const select_job *job, plan *p, int64_t code);
/* For the tasks of a narrow plan. */
int kept_score_task(select_job *job, const plan *p, uint32_t item);
/* When a head's pages are chosen; ranks as in choose_pages(). */
int kept_chosen(const select_job *job, const plan *p, uint32_t head, uint32_t *ranks);
