/* Select's choice: which pages a list may have, and which of them its scores make the best. */
#include "ndp/select_choose.h"

window window_of(const select_job *job, const plan *p, uint64_t list) {
    const cxlkv_budget *budget = p->budget;
    uint64_t page_tokens = job->layout->page_tokens;
    bool per_query = job->args->by.per == CXLKV_PER_QUERY;
    window w = {0};
    if (p->rows == 0) return w;
    uint64_t first_position = p->view.tokens - p->rows + (per_query ? list : 0);
    uint64_t last_position = per_query ? first_position : p->view.tokens - 1;
    w.pages = (uint32_t)(last_position / page_tokens) + 1;
    w.low = (uint32_t)(view_low(&p->view, per_query ? list : 0, p->rows) / page_tokens);
    w.sinks = min_u32(budget->sinks, w.pages);
    if (w.sinks < w.low) w.sinks = w.low; /* the first pages are out of sight */
    uint64_t recent = first_position / page_tokens + 1;
    recent = recent > budget->recent ? recent - budget->recent : 0;
    if (budget->recent == 0) recent = w.pages;
    w.recent = recent < w.sinks ? w.sinks : (uint32_t)recent;
    uint32_t forced = w.sinks - w.low + w.pages - w.recent, visible = w.pages - w.low;
    uint64_t wanted = budget->pages;
    if (budget->kind == CXLKV_BUDGET_SHARE) {
        /* A share like 0.07 is no binary fraction: 7 of 100 pages, not the 8 of rounding up. */
        wanted = (uint64_t)ceil(budget->amount * visible * (1 - 1e-12));
    }
    if (budget->kind == CXLKV_BUDGET_MASS || budget->kind == CXLKV_BUDGET_ALL) wanted = visible;
    w.k = (uint32_t)min_u64(visible, wanted > forced ? wanted : forced);
    return w;
}

/* The `wanted` largest of as many or more, largest first. */
static void largest_first(const uint32_t *ranks, uint32_t count, uint32_t wanted,
                          uint32_t *largest) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (kept == wanted && ranks[i] <= largest[kept - 1]) continue;
        uint32_t at = kept < wanted ? kept++ : kept - 1;
        for (; at > 0 && largest[at - 1] < ranks[i]; at--) largest[at] = largest[at - 1];
        largest[at] = ranks[i];
    }
}

enum { SAMPLE_SCORES = 64, FEW_SCORES = 128 };

/* A rank that the wanted-th best of many is below 1 time in 700, by a sample. */
static uint32_t rank_of_sample(const float *scores, uint32_t count, uint32_t wanted) {
    float likely = (float)wanted / (float)count * SAMPLE_SCORES;
    uint32_t place = (uint32_t)(likely + 3 * sqrtf(likely)) + 1;
    uint32_t ranks[SAMPLE_SCORES], largest[SAMPLE_SCORES];
    if (count < 4 * SAMPLE_SCORES || place >= SAMPLE_SCORES / 2) return 0;
    for (uint32_t i = 0; i < SAMPLE_SCORES; i++)
        ranks[i] = rank_of(scores[(uint64_t)i * count / SAMPLE_SCORES]);
    largest_first(ranks, SAMPLE_SCORES, place, largest);
    return largest[place - 1];
}

static uint32_t ranks_from(const float *scores, uint32_t count, uint32_t least, uint32_t *ranks) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        ranks[kept] = rank_of(scores[i]);
        kept += ranks[kept] >= least;
    }
    return kept;
}

/* The same as kth_largest() of few ranks. */
static float kth_of_few(const uint32_t *ranks, uint32_t count, uint32_t wanted, uint32_t *equal) {
    uint32_t best[FEW_SCORES];
    largest_first(ranks, count, wanted, best);
    uint32_t worst = best[wanted - 1], at = wanted;
    while (at > 0 && best[at - 1] == worst) at--;
    *equal = wanted - at;
    return value_of_rank(worst);
}

float kth_largest(const float *scores, uint32_t count, uint32_t wanted, uint32_t *ranks,
                  uint32_t *equal) {
    enum { DIGITS = 3, DIGIT_VALUES = 1 << 11 };
    static const int shifts[DIGITS] = {21, 10, 0};
    static const uint32_t largest[DIGITS] = {DIGIT_VALUES - 1, DIGIT_VALUES - 1, 1023};
    uint32_t counts[DIGIT_VALUES], found = 0;
    uint32_t here = ranks_from(scores, count, rank_of_sample(scores, count, wanted), ranks);
    if (here < wanted) here = ranks_from(scores, count, 0, ranks);
    if (here <= FEW_SCORES) return kth_of_few(ranks, here, wanted, equal);
    for (int i = 0; i < DIGITS; i++) {
        uint32_t digit = largest[i], kept = 0;
        memset(counts, 0, sizeof(counts));
        for (uint32_t at = 0; at < here; at++) counts[ranks[at] >> shifts[i] & largest[i]]++;
        while (digit > 0 && counts[digit] < wanted) wanted -= counts[digit--];
        for (uint32_t at = 0; at < here; at++) {
            ranks[kept] = ranks[at];
            kept += (ranks[at] >> shifts[i] & largest[i]) == digit;
        }
        here = kept;
        found |= digit << shifts[i];
    }
    *equal = wanted;
    return value_of_rank(found);
}

typedef struct candidate {
    float mass;
    uint32_t page;
} candidate;

static int by_mass(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    uint32_t rx = rank_of(x->mass), ry = rank_of(y->mass);
    if (rx != ry) return rx > ry ? -1 : 1;
    return x->page < y->page ? -1 : 1;
}

static bool is_forced(const window *w, uint32_t page) {
    return page < w->sinks || page >= w->recent;
}

/* The fewest pages, forced ones first, whose shares add up to the mass: as flags. */
static int choose_mass(const float *scores, const window *w, double mass, uint8_t *chosen) {
    candidate *order = malloc((w->pages + 1) * sizeof(*order));
    if (!order) return fail(ENOMEM, "no memory to sort %u pages", w->pages);
    uint32_t count = 0;
    double sum = 0;
    for (uint32_t page = w->low; page < w->pages; page++) {
        chosen[page] = is_forced(w, page);
        if (chosen[page]) sum += scores[page];
        else order[count++] = (candidate){scores[page], page};
    }
    qsort(order, count, sizeof(*order), by_mass);
    /* Shares are rounded floats: a mass of 1 means every page that has any. With a NaN no share
     * is known, so that nothing is enough and every page is chosen. */
    for (uint32_t i = 0; i < count && !(mass >= 1.0 ? order[i].mass <= 0 : sum >= mass); i++) {
        chosen[order[i].page] = 1;
        sum += order[i].mass;
    }
    free(order);
    return 0;
}

/* Which of the free pages are chosen, one after the other. */
typedef struct chooser {
    float worst;                 /* that is chosen; NaN: only such are */
    uint32_t left;               /* to choose in all */
    uint32_t equal;              /* of those, as good as the worst */
} chooser;

static bool choose_next(chooser *c, float score) {
    if (score < c->worst || c->left == 0) return false;
    bool is_worst = rank_of(score) == rank_of(c->worst);
    if (is_worst ? c->equal == 0 : isnan(c->worst)) return false;
    c->equal -= is_worst;
    c->left--;
    return true;
}

uint32_t best_pages(const window *w, uint32_t wanted, const float *scores, uint32_t *ranks,
                    int32_t *pages) {
    chooser best = {.left = wanted};
    uint32_t count = 0;
    if (wanted)
        best.worst =
            kth_largest(scores + w->sinks, w->recent - w->sinks, wanted, ranks, &best.equal);
    for (uint32_t page = w->sinks; page < w->recent; page++)
        if (choose_next(&best, scores[page])) pages[count++] = (int32_t)page;
    return count;
}

int choose_pages(const select_job *job, const plan *p, const window *w, uint64_t row,
                 const float *scores, uint32_t *ranks, uint8_t *chosen) {
    const cxlkv_select_args *args = job->args;
    int32_t *pages = args->pages + row * args->k;
    float *values = args->scores + row * args->k;
    bool mass = p->budget->kind == CXLKV_BUDGET_MASS;
    chooser best = {.left = free_choices(w)};
    uint32_t count = 0;
    int code = mass ? choose_mass(scores, w, p->budget->amount, chosen) : 0;
    if (code < 0) return code;
    if (!mass && best.left)
        best.worst =
            kth_largest(scores + w->sinks, w->recent - w->sinks, best.left, ranks, &best.equal);
    for (uint32_t page = w->low; page < w->pages; page++) {
        if (mass ? !chosen[page] : !is_forced(w, page) && !choose_next(&best, scores[page]))
            continue;
        pages[count] = (int32_t)page;
        values[count++] = scores[page];
    }
    args->counts[row] = (int32_t)count;
    for (; count < args->k; count++) {
        pages[count] = -1;
        values[count] = -INFINITY;
    }
    return 0;
}
