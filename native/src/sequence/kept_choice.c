/* Choices of pages that decode keeps for the steps that follow.
 *
 * From one token to the next, mostly the same pages hold the attention. A choice is kept for some
 * steps of one token; what is new since then is attended to as well. When it is time to choose
 * anew, the new choice tells what the old one missed: where the old pages have WANTED_SHARE of what
 * the new ones have, by the exponentials of their scores, the next choice is kept twice as long, up
 * to args->refresh steps; where they have not, half as long. Layers choose in different steps. */
#include "sequence/kept_choice.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

static const double WANTED_SHARE = 0.9;

/* What was chosen for a layer. */
typedef struct kept_choice {
    cxlkv_decode_args args; /* what it was chosen by; its pointers are not followed */
    cxlkv_budget *budgets; /* [args.budget_count] */
    uint64_t *tokens; /* [count] of each sequence, in the step that used it last */
    uint32_t *pages_then; /* [count] that there were when it was made */
    chosen_lists lists;
    uint32_t interval; /* steps that it is for */
    uint32_t left;
} kept_choice;

void chosen_free(chosen_lists *chosen) {
    free(chosen->pages);
    free(chosen->scores);
    free(chosen->counts);
    chosen->pages = NULL;
    chosen->scores = NULL;
    chosen->counts = NULL;
}

int chosen_reserve(chosen_lists *chosen, uint64_t pages) {
    chosen_free(chosen);
    chosen->k = (uint32_t)pages;
    chosen->pages = malloc((chosen->lists * pages + 1) * sizeof(*chosen->pages));
    chosen->scores = malloc((chosen->lists * pages + 1) * sizeof(*chosen->scores));
    chosen->counts = malloc((chosen->lists + 1) * sizeof(*chosen->counts));
    return chosen->pages && chosen->scores && chosen->counts
               ? 0
               : fail(ENOMEM, "no memory for %lu lists of %lu pages", chosen->lists, pages);
}

static void choice_free(kept_choice *kept) {
    chosen_free(&kept->lists);
    free(kept->budgets);
    free(kept->tokens);
    free(kept->pages_then);
    *kept = (kept_choice){0};
}

void choices_free(cxlkv_batch *batch) {
    for (uint32_t layer = 0; batch->choices && layer < batch->pool->layout.layers; layer++)
        choice_free(&batch->choices[layer]);
    free(batch->choices);
}

static uint64_t tokens_of(const cxlkv_batch *batch, uint32_t layer, uint32_t i) {
    return batch->sequences[i]->layer_tokens[layer];
}

static uint32_t pages_of(const cxlkv_batch *batch, uint32_t layer, uint32_t i) {
    uint32_t page_tokens = batch->pool->layout.page_tokens;
    return (uint32_t)((tokens_of(batch, layer, i) + page_tokens - 1) / page_tokens);
}

/* Each sequence has one new token, and what it is asked by is as before. */
static bool goes_on(const cxlkv_batch *batch, const kept_choice *kept,
                    const cxlkv_decode_args *now) {
    const cxlkv_decode_args *then = &kept->args;
    if (!kept->budgets || then->q_heads != now->q_heads || then->method != now->method ||
        then->union_over != now->union_over || then->per != now->per || then->scale != now->scale ||
        then->errors != now->errors || then->refresh != now->refresh ||
        then->budget_count != now->budget_count ||
        memcmp(kept->budgets, now->budgets, now->budget_count * sizeof(*now->budgets)))
        return false;
    for (uint32_t i = 0; i < batch->count; i++)
        if (now->starts[i + 1] - now->starts[i] != 1 ||
            tokens_of(batch, now->layer, i) != kept->tokens[i] + 1)
            return false;
    return true;
}

/* The kept list, with pages [then, now) behind it. */
static void list_take(const chosen_lists *kept, uint64_t list, uint32_t then, uint32_t now,
                      chosen_lists *to) {
    int32_t *pages = to->pages + list * to->k;
    uint32_t count = (uint32_t)kept->counts[list];
    memcpy(pages, kept->pages + list * kept->k, count * sizeof(*pages));
    for (uint32_t page = then; page < now; page++) pages[count++] = (int32_t)page;
    to->counts[list] = (int32_t)count;
    for (; count < to->k; count++) pages[count] = -1;
}

/* The kept lists as they are now. */
static int lists_now(const cxlkv_batch *batch, const kept_choice *kept, uint32_t layer,
                     chosen_lists *to) {
    uint32_t heads = batch->pool->layout.kv_heads, more = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        uint32_t added = pages_of(batch, layer, i) - kept->pages_then[i];
        if (added > more) more = added;
    }
    int code = chosen_reserve(to, kept->lists.k + (uint64_t)more);
    for (uint64_t list = 0; code == 0 && list < kept->lists.lists; list++) {
        uint32_t i = (uint32_t)(list / heads);
        list_take(&kept->lists, list, kept->pages_then[i], pages_of(batch, layer, i), to);
    }
    return code;
}

int choice_take(cxlkv_batch *batch, const cxlkv_decode_args *args, chosen_lists *chosen) {
    int code = 0;
    pthread_mutex_lock(&batch->choice_lock);
    kept_choice *kept = args->refresh > 1 && batch->choices ? &batch->choices[args->layer] : NULL;
    if (kept && kept->left && goes_on(batch, kept, args)) {
        code = lists_now(batch, kept, args->layer, chosen);
        for (uint32_t i = 0; code == 0 && i < batch->count; i++) kept->tokens[i]++;
        kept->left--;
        if (code == 0) code = 1;
    }
    pthread_mutex_unlock(&batch->choice_lock);
    return code;
}

/* What the pages of a new list have that the old one has, too. */
static double share_of(const chosen_lists *old, const chosen_lists *new, uint64_t list,
                       bool by_mass) {
    const int32_t *pages = new->pages + list * new->k, *had = old->pages + list * old->k;
    const float *scores = new->scores + list * new->k;
    uint32_t count = (uint32_t)new->counts[list], had_count = (uint32_t)old->counts[list], at = 0;
    float largest = kernels_largest(scores, count);
    double found = 0, all = 0;
    for (uint32_t i = 0; i < count; i++) {
        double weight = by_mass ? (double)scores[i] : exp((double)(scores[i] - largest));
        while (at < had_count && had[at] < pages[i]) at++;
        all += weight;
        if (at < had_count && had[at] == pages[i]) found += weight;
    }
    return all > 0 ? found / all : 0; /* of a NaN: 0 */
}

/* Of all lists, on average. */
static bool stood_the_test(const cxlkv_batch *batch, const kept_choice *kept, uint32_t layer,
                           const chosen_lists *now) {
    chosen_lists had = {.lists = now->lists};
    bool by_mass =
        kept->args.method == CXLKV_METHOD_ATTENTION || kept->budgets[0].kind == CXLKV_BUDGET_MASS;
    double sum = 0;
    if (lists_now(batch, kept, layer, &had) == 0)
        for (uint64_t list = 0; list < now->lists; list++)
            sum += share_of(&had, now, list, by_mass);
    chosen_free(&had);
    return sum >= WANTED_SHARE * (double)now->lists;
}

/* Takes the lists over; their scores are not kept. */
static int choice_store(const cxlkv_batch *batch, kept_choice *kept, const cxlkv_decode_args *asked,
                        chosen_lists *chosen) {
    uint32_t interval = kept->interval, left = kept->left;
    choice_free(kept);
    *kept = (kept_choice){.args = *asked,
                          .interval = interval,
                          .left = left,
                          .lists = *chosen,
                          .budgets = malloc(asked->budget_count * sizeof(*kept->budgets)),
                          .tokens = malloc(batch->count * sizeof(*kept->tokens)),
                          .pages_then = malloc(batch->count * sizeof(*kept->pages_then))};
    chosen->pages = NULL;
    chosen->counts = NULL;
    kept->lists.scores = NULL;
    if (!kept->budgets || !kept->tokens || !kept->pages_then) {
        choice_free(kept);
        return fail(ENOMEM, "no memory to keep what %u sequences chose", batch->count);
    }
    memcpy(kept->budgets, asked->budgets, asked->budget_count * sizeof(*kept->budgets));
    for (uint32_t i = 0; i < batch->count; i++) {
        kept->tokens[i] = tokens_of(batch, asked->layer, i);
        kept->pages_then[i] = pages_of(batch, asked->layer, i);
    }
    return 0;
}

static int keep_locked(cxlkv_batch *batch, const cxlkv_decode_args *asked, chosen_lists *chosen) {
    uint32_t layers = batch->pool->layout.layers;
    if (!batch->choices) batch->choices = calloc(layers, sizeof(*batch->choices));
    if (!batch->choices) return fail(ENOMEM, "no memory for the choices of %u layers", layers);
    kept_choice *kept = &batch->choices[asked->layer];
    uint32_t before = kept->interval;
    bool stood = goes_on(batch, kept, asked) && stood_the_test(batch, kept, asked->layer, chosen);
    if (!kept->budgets) kept->interval = 1;
    else kept->interval = stood ? min_u32(2 * before, asked->refresh) : (before + 1) / 2;
    kept->left = kept->interval - 1;
    if (kept->interval > before) kept->left -= asked->layer % kept->interval;
    return choice_store(batch, kept, asked, chosen);
}

int choice_keep(cxlkv_batch *batch, const cxlkv_decode_args *asked, chosen_lists *chosen) {
    bool one_each = true;
    for (uint32_t i = 0; i < batch->count; i++)
        one_each &= asked->starts[i + 1] - asked->starts[i] == 1;
    if (asked->refresh <= 1 || !one_each) return 0;
    pthread_mutex_lock(&batch->choice_lock);
    int code = keep_locked(batch, asked, chosen);
    pthread_mutex_unlock(&batch->choice_lock);
    return code;
}
