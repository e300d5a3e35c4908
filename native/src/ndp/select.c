/* Select: score the pages of a layer for each query, and name the best ones.
 *
 * A page's score for a kv head is the largest scale * q.k over its visible tokens and the group's
 * query heads (exact), an upper bound of it (digest), an estimate (sketch), or, by attention and
 * under a mass budget, the page's share of the attention, averaged over the group. Equal scores:
 * the lower page. A NaN score wins. */
#include <math.h>

#include "format/scorers.h"
#include "host/threads.h"
#include "ndp/ahead.h"
#include "ndp/select.h"
#include "ndp/select_choose.h"
#include "ndp/select_kept.h"
#include "ndp/select_scan.h"
#include "ndp/select_score.h"
#include "ndp/select_scorer.h"
#include "ndp/select_sketch.h"
#include "ndp/stored.h"
#include "sequence/batch.h"
#include "sequence/usage.h"
#include "sharing/this_host.h"

enum { TOGETHER_PAGES = 8, SCRATCH_LIMIT = 1 << 30 };

/* counts: what is read is not in the cache yet. */
static int score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last,
                       bool counts) {
    const cxlkv_layout *layout = job->layout;
    uint64_t bytes = 0, key_bytes = kind_token_bytes(layout, PIECE_KEYS);
    uint64_t digest_bytes = piece_data_bytes(layout, PIECE_DIGEST);
    if (p->stage) return sketch_score_pages(job, p, first, last, counts);
    if (job->scorer) return scorer_score_pages(job, p, first, last, counts);
    uint32_t run = first, run_end = last;
    run_of(job, p, &run, &run_end);
    bool asks = counts && run == run_end;
    int code = score_run(job, p, run, run_end, counts);
    if (code < 0) return code;
    ahead next;
    if (asks)
        next = ahead_begin(&p->view, scored_kind(job), NULL, first, p->view.pages, 0,
                           layout->kv_heads, false);
    for (uint32_t index = first; index < last; index++) {
        bool done = index >= run && index < run_end;
        code = done ? 0 : score_page(job, p, index, asks ? &next : NULL);
        if (code < 0) return code;
        bool digest = job->args->by.method == CXLKV_METHOD_DIGEST && index < p->view.complete;
        bytes += layout->kv_heads *
                 (digest ? digest_bytes : key_bytes * view_filled(&p->view, index));
    }
    if (counts) atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    return 0;
}

static int score_task(void *context, uint32_t item) {
    select_job *job = context;
    const plan *p = &job->plans[entry_at(&job->plans->first_task, sizeof(plan), job->batch->count,
                                         item)];
    uint32_t begin = first_own_page(p) + (item - p->first_task) * job->task_pages;
    uint32_t end = min_u32(begin + job->task_pages, p->view.pages);
    bool together = p->follower && begin < p->follower->shared && !job->scorer;
    uint32_t step = together ? TOGETHER_PAGES : TASK_PAGES; /* a scorer prepares itself each time */
    int code = 0;
    if (p->narrow) return kept_score_task(job, p, item - p->first_task);
    for (uint32_t first = begin; code == 0 && first < end; first += step) {
        uint32_t last = min_u32(first + step, end);
        code = score_pages(job, p, first, last, true);
        for (const plan *f = p->follower; f && code == 0; f = f->follower) {
            uint32_t low = first < f->low ? f->low : first, high = min_u32(last, f->shared);
            if (low < high) code = score_pages(job, f, low, high, false);
        }
    }
    return code;
}

/* ---- choosing ---- */

/* Score of the layer: the best over its heads (their mean of masses), in head 0's place. */
static void merge_heads(const plan *p, bool mass, float *scores, uint32_t heads) {
    uint32_t pages = p->view.pages;
    for (uint32_t head = 1; head < heads; head++)
        for (uint32_t page = 0; page < pages; page++) {
            float value = scores[(uint64_t)head * pages + page];
            if (mass) scores[page] += value;
            else if (rank_of(value) > rank_of(scores[page])) scores[page] = value;
        }
    for (uint32_t page = 0; mass && page < pages; page++) scores[page] /= (float)heads;
}

/* K and V of a list for one head; an open tail has fewer tokens than a page. */
static uint64_t list_bytes(const select_job *job, const plan *p, uint64_t list) {
    const cxlkv_layout *layout = job->layout;
    const cxlkv_select_args *args = job->args;
    uint64_t tokens = 0;
    for (int32_t i = 0; i < args->counts[list]; i++)
        tokens += view_filled(&p->view, (uint32_t)args->pages[list * args->k + (uint64_t)i]);
    return tokens * token_bytes(layout);
}

/* The list of one head; of all heads, when they have one together. */
static int choose_list(select_job *job, const plan *p, uint64_t list, uint32_t head,
                       uint32_t *ranks, uint8_t *chosen) {
    const cxlkv_select_args *args = job->args;
    uint32_t heads = job->layout->kv_heads, k = args->k;
    window w = window_of(job, p, list);
    uint64_t row = (p->first_list + list) * heads + head;
    float *scores = p->scores + (list * heads + head) * p->view.pages;
    bool layer = args->by.union_over == CXLKV_UNION_LAYER;
    if (layer && heads > 1) merge_heads(p, is_by_mass(job, p), scores, heads);
    int code = choose_pages(job, p, &w, row, scores, ranks, chosen);
    if (code < 0) return code;
    uint64_t bytes = list_bytes(job, p, row);
    for (uint32_t other = 1; layer && other < heads; other++) {
        memcpy(args->pages + (row + other) * k, args->pages + row * k, k * sizeof(int32_t));
        memcpy(args->scores + (row + other) * k, args->scores + row * k, k * sizeof(float));
        args->counts[row + other] = args->counts[row];
        bytes += list_bytes(job, p, row + other);
    }
    atomic_fetch_add_explicit(&job->bytes_fetched, bytes, memory_order_relaxed);
    return 0;
}

/* For batch->count * kv_heads items. */
static int choose_task(void *context, uint32_t item) {
    select_job *job = context;
    uint32_t heads = job->layout->kv_heads, head = item % heads;
    const plan *p = &job->plans[item / heads];
    if (job->args->by.union_over == CXLKV_UNION_LAYER && head) return 0;
    uint32_t *ranks = malloc((p->view.pages + 1) * (sizeof(*ranks) + 1));
    if (!ranks) return fail(ENOMEM, "no memory to choose among %u pages", p->view.pages);
    uint8_t *chosen = (uint8_t *)(ranks + p->view.pages + 1);
    int code = 0;
    for (uint64_t list = 0; code == 0 && list < p->lists; list++)
        code = choose_list(job, p, list, head, ranks, chosen);
    if (code == 0 && p->kept) code = kept_chosen(job, p, head, ranks);
    free(ranks);
    return code;
}

/* A mass budget makes lists shorter than its bound: close the gaps. */
static void compact(const select_job *job, uint64_t rows) {
    cxlkv_select_args *args = job->args;
    uint32_t longest = 0, k = args->k;
    for (uint64_t row = 0; row < rows; row++)
        if ((uint32_t)args->counts[row] > longest) longest = (uint32_t)args->counts[row];
    if (longest == k) return;
    for (uint64_t row = 1; row < rows; row++) {
        memmove(args->pages + row * longest, args->pages + row * k, longest * sizeof(int32_t));
        memmove(args->scores + row * longest, args->scores + row * k, longest * sizeof(float));
    }
    args->k = longest;
}

/* ---- putting it together ---- */

static int budget_check(const cxlkv_select_args *args, uint32_t i) {
    const cxlkv_budget *budget = &args->by.budgets[i];
    if (budget->kind > CXLKV_BUDGET_ALL || (budget->kind == CXLKV_BUDGET_PAGES && !budget->pages))
        return fail(CXLKV_E_ARGUMENT, "budget %u: at least one page", i);
    bool is_amount = budget->kind == CXLKV_BUDGET_SHARE || budget->kind == CXLKV_BUDGET_MASS;
    if (is_amount && !(budget->amount > 0 && budget->amount <= 1))
        return fail(CXLKV_E_ARGUMENT, "budget %u: %g is outside (0, 1]", i, budget->amount);
    uint32_t method = args->by.method;
    bool by_mass = method == CXLKV_METHOD_EXACT || method == CXLKV_METHOD_AUTO ||
                   method == CXLKV_METHOD_ATTENTION || method == CXLKV_METHOD_SCORER;
    if (budget->kind == CXLKV_BUDGET_MASS && !by_mass)
        return fail(CXLKV_E_ARGUMENT, "budget %u: attention mass needs method exact or attention",
                    i);
    return 0;
}

int select_bounds(const cxlkv_layout *layout, const cxlkv_select_args *args, uint32_t rows,
                  uint32_t sequences) {
    uint32_t method = args->by.method;
    bool known = method <= CXLKV_METHOD_ATTENTION || method == CXLKV_METHOD_SCORER ||
                 method == CXLKV_METHOD_SKETCH;
    int code = queries_bounds(layout, args->q_heads, args->queries.dtype, rows);
    if (code < 0) return code;
    if (!known || args->by.union_over > CXLKV_UNION_LAYER || args->by.per > CXLKV_PER_SEQUENCE)
        return fail(CXLKV_E_ARGUMENT, "select: unknown method, union or per");
    if (!(args->by.errors >= 0))
        return fail(CXLKV_E_ARGUMENT, "select: %g errors", (double)args->by.errors);
    if (args->by.method == CXLKV_METHOD_TWO_STAGE && !layout->sketch &&
        !has_planes(layout, PIECE_KEYS))
        return fail(CXLKV_E_ARGUMENT, "select: this pool has no sketches (it was made with "
                    "sketch=False), nor keys in progressive: use method exact or digest");
    if (args->by.method == CXLKV_METHOD_SKETCH && !layout->sketch)
        return fail(CXLKV_E_ARGUMENT, "select: this pool has no sketches (it was made with "
                    "sketch=False): use another method");
    if (!(args->scale > 0 && args->scale < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "select: scale %g must be positive and finite",
                    (double)args->scale);
    if (args->by.budget_count != 1 && args->by.budget_count != sequences)
        return fail(CXLKV_E_ARGUMENT, "%u budgets for %u sequences: give 1, or one for each",
                    args->by.budget_count, sequences);
    for (uint32_t i = 0; code == 0 && i < args->by.budget_count; i++) code = budget_check(args, i);
    return code;
}

int select_check(const cxlkv_batch *batch, const cxlkv_select_args *args) {
    int code = need(args->by.budget_count, "budgets", args->by.budgets, NULL);
    if (code == 0) code = layer_check(batch->pool, args->layer);
    if (code == 0)
        code = select_bounds(layout_of(batch->pool, args->layer), args,
                             rows_asked(batch, args->starts), batch->count);
    return code < 0 ? code : scorer_check(batch, args);
}

/* Followers are kept by how much they share, most first. */
static void find_leader(select_job *job, plan *p) {
    for (plan *leader = job->plans; leader < p && !p->leader; leader++) {
        if (leader->leader || !is_scored(leader) || !is_scored(p) || leader->low > p->low) continue;
        if (leader->narrow || p->narrow) continue;
        p->shared = views_shared(&leader->view, &p->view, p->low);
        if (p->shared < p->low + TASK_PAGES) continue;
        p->leader = leader;
        plan **at = &leader->follower;
        while (*at && (*at)->shared > p->shared) at = &(*at)->follower;
        p->follower = *at;
        *at = p;
    }
}

/* Few pages make short tasks, so that all threads get some, but none too short to wake one for. */
static uint32_t task_pages_of(const cxlkv_batch *batch, uint32_t layer) {
    enum { TASKS_OF_A_THREAD = 4, TASK_BYTES_MIN = 64 << 10 };
    const cxlkv_layout *layout = layout_of(batch->pool, layer);
    uint64_t page_bytes = piece_data_bytes(layout, PIECE_KEYS), pages = 0;
    for (uint32_t i = 0; i < batch->count; i++) pages += view_of(batch->sequences[i], layer).pages;
    page_bytes *= layout->kv_heads;
    uint64_t least = TASK_BYTES_MIN / page_bytes + 1;
    uint64_t wanted = pages / (TASKS_OF_A_THREAD * batch->pool->threads.count);
    return (uint32_t)min_u64(wanted > least ? wanted : least, TASK_PAGES);
}

/* Lengths, lists, and args->k: all that is known before a byte is read. */
static uint64_t make_plans(select_job *job) {
    cxlkv_select_args *args = job->args;
    uint64_t lists = 0, queries = 0;
    uint32_t tasks = 0, page_tokens = job->layout->page_tokens;
    uint32_t kv_heads = job->layout->kv_heads;
    args->k = args->found.lists_staged = 0;
    args->found.mean_error = 0;
    job->task_pages = task_pages_of(job->batch, args->layer);
    for (uint32_t i = 0; i < job->batch->count; i++) {
        plan *p = &job->plans[i];
        p->view = view_of(job->batch->sequences[i], args->layer);
        p->budget = &args->by.budgets[args->by.budget_count == 1 ? 0 : i];
        p->first_row = (uint64_t)args->starts[i];
        p->rows = (uint64_t)(args->starts[i + 1] - args->starts[i]);
        p->first_query = query_place(p->rows, job->group, kv_heads, &queries);
        p->block = query_block(p->rows, job->group);
        p->first_list = lists;
        p->lists = args->by.per == CXLKV_PER_QUERY ? p->rows : 1;
        p->first_task = tasks;
        p->low = p->rows ? (uint32_t)(view_low(&p->view, 0, p->rows) / page_tokens) : 0;
        kept_begin(job, p);
        find_leader(job, p);
        uint32_t own = is_scored(p) ? p->view.pages - first_own_page(p) : 0;
        if (!p->narrow) p->tasks = (own + job->task_pages - 1) / job->task_pages;
        tasks += p->tasks;
        lists += p->lists;
        for (uint64_t list = 0; list < p->lists; list++) {
            uint32_t k = window_of(job, p, list).k;
            if (k > args->k) args->k = k;
        }
    }
    return lists;
}

/* Scratch: packed queries, then scores, then log-sums of mass budgets. */
static int place_scratch(select_job *job, uint32_t rows) {
    uint64_t heads = job->layout->kv_heads, q_heads = job->args->q_heads;
    uint64_t query_floats = queries_bytes(job->layout, job->isa, job->query_total) / sizeof(float);
    uint64_t sketch_floats = 0, floats = query_floats;
    if (is_estimated(job))
        floats += sketch_floats = sketch_query_floats(job, job->query_total);
    for (uint32_t pass = 0; pass < 2; pass++) {
        float *at = (float *)job->batch->scratch + query_floats + sketch_floats;
        for (uint32_t i = 0; i < job->batch->count; i++) {
            plan *p = &job->plans[i];
            uint64_t scores = align_up(p->lists * heads * p->view.pages, 16), sums = 0;
            uint64_t stage = sketch_plan_floats(job, p);
            if (is_scored(p) && is_by_mass(job, p))
                sums = align_up(p->rows * q_heads * p->view.pages, 16);
            if (pass == 0) {
                floats += scores + sums + stage;
                continue;
            }
            p->scores = at;
            p->log_sums = sums ? at + scores : NULL;
            p->stage = stage ? at + scores + sums : NULL;
            at += scores + sums + stage;
            for (uint64_t j = 0; j < scores; j++) p->scores[j] = is_scored(p) ? -INFINITY : 0;
        }
        if (pass == 1) break;
        if (floats * sizeof(float) > SCRATCH_LIMIT)
            return fail(CXLKV_E_ARGUMENT,
                        "select of %u rows needs %lu MiB of scores: select fewer rows at once",
                        rows, floats * sizeof(float) >> 20);
        if (!batch_scratch(job->batch, floats * sizeof(float) + LINE_BYTES)) return -ENOMEM;
    }
    return 0;
}

static int64_t select_locked(select_job *job) {
    cxlkv_select_args *args = job->args;
    cxlkv_batch *batch = job->batch;
    uint32_t rows = 0, tasks = 0, heads = job->layout->kv_heads;
    bool any_mass = false, any_stage = false;
    int code = queries_check(batch, args->layer, args->q_heads, &args->queries, args->starts,
                             &rows);
    if (code < 0) return code;
    if (args->by.method == CXLKV_METHOD_SCORER)
        job->scorer = scorer_find(batch->pool, args->by.scorer);
    job->group = args->q_heads / heads;
    job->query_total = queries_total(batch, heads, args->q_heads, args->starts);
    uint64_t lists = make_plans(job) * heads;
    if (lists * args->k > args->capacity)
        return fail(CXLKV_E_ROOM, "select: room for %lu pages, %lu wanted", args->capacity,
                    lists * args->k);
    code = place_scratch(job, rows);
    if (code < 0) return code;
    query_source source = {&args->queries, job->layout, args->q_heads, args->starts, NULL,
                           args->scale};
    job->queries = queries_pack(batch, job->isa, &source, batch->scratch);
    for (uint32_t i = 0; i < batch->count; i++) {
        tasks += job->plans[i].tasks;
        any_mass |= job->plans[i].log_sums != NULL;
        any_stage |= job->plans[i].stage && args->by.method == CXLKV_METHOD_TWO_STAGE;
    }
    if (is_estimated(job)) {
        uint64_t used = queries_bytes(job->layout, job->isa, job->queries.total);
        sketch_prepare(job, (float *)((uint8_t *)batch->scratch + used));
    }
    if (args->by.method == CXLKV_METHOD_TWO_STAGE) {
        if (any_stage)
            code = run_step_tasks(batch->pool, batch->count * heads, sketch_sample_task, job);
        if (code < 0) return code;
        sketch_errors_all(job);
    }
    if (job->scorer) code = scorer_summarise(job);
    if (code < 0) return code;
    code = run_step_tasks(batch->pool, tasks, score_task, job);
    if (code == 0 && any_stage) {
        uint32_t segments = 0;
        for (uint32_t i = 0; i < batch->count; i++) segments += sketch_segments(&job->plans[i]);
        code = run_step_tasks(batch->pool, batch->count * heads, sketch_cut_task, job);
        if (code == 0) code = run_step_tasks(batch->pool, segments, sketch_finish_task, job);
    }
    if (code == 0 && any_mass)
        code = run_step_tasks(batch->pool, batch->count * heads, mass_task, job);
    if (code == 0) code = run_step_tasks(batch->pool, batch->count * heads, choose_task, job);
    if (code < 0) return code;
    compact(job, lists);
    args->found.lists = (uint32_t)(lists / heads);
    args->found.bytes_scored = atomic_load(&job->bytes_scored);
    args->found.bytes_sketched = atomic_load(&job->bytes_sketched);
    args->found.tokens_scored = atomic_load(&job->tokens_scored);
    args->found.bytes_fetched = atomic_load(&job->bytes_fetched);
    count_add(batch->pool, COUNT_SCORED_BYTES, args->found.bytes_scored);
    cxlkv_picked chosen = select_chosen(args);
    hotness_count(batch, args->layer, &chosen, args->starts);
    return args->k;
}

static int64_t select_kept(select_job *job) {
    int64_t code = select_locked(job);
    bool narrow = false;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        narrow |= job->plans[i].narrow;
        kept_end(job, &job->plans[i], code);
    }
    job->args->found.method = narrow ? CXLKV_METHOD_KEPT : job->args->by.method;
    return code;
}

int64_t select_here(cxlkv_batch *batch, cxlkv_select_args *args) {
    int64_t code = layer_check(batch->pool, args->layer);
    if (code < 0) return code;
    const layer_shape *shape = shape_of(batch->pool, args->layer);
    select_job job = {.batch = batch, .layout = &shape->layout, .strides = shape->strides,
                      .args = args, .isa = kernels_current()};
    job.keys = stored_of(job.layout, job.isa, PIECE_KEYS);
    job.plans = calloc(batch->count, sizeof(*job.plans));
    if (!job.plans) return fail(ENOMEM, "no memory to plan a selection");
    code = IN_BATCH(batch, false, peers_verify(batch->pool, select_kept(&job)));
    free(job.plans);
    return code;
}
