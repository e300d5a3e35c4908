/* What method "auto" comes to: the cheapest way to attend to a layer, by what each has to read and
 * to compute.
 *
 * Attending to everything reads keys and values and computes on all of them. The others first read
 * keys, or sketches and some keys, and then attend to what they choose. Reading goes on while the
 * threads compute, so that the longer of the two counts; single keys are waited for. The same
 * arguments come to the same method: a step's output does not depend on how busy the machine is.
 * docs/decisions/0030-auto.md has how near the estimates are. */
#include "kernels/sketch.h"
#include "ndp/cost.h"
#include "ndp/select_sketch.h"
#include "sequence/batch.h"

/* Of each thread, in bytes a ns, where nobody has measured it; and up to so many threads. */
static const double READ_RATE = 12;
enum { READ_THREADS = 8 };
/* ns for a key that is read alone, much of it for the translation of its address; for the lists of
 * a head, and for each of its pages; and what attending takes beside its products, as a part. */
static const double KEY_NS = 35, LIST_NS = 1500, PAGE_NS = 3, ATTEND_REST = 1.25;

/* What a way to attend takes. */
typedef struct work {
    double read_bytes;
    double compute_ns; /* on one thread */
    double wait_ns; /* the same, and nothing is read meanwhile */
} work;

/* The rows of a sequence, as all ways see them. */
typedef struct scene {
    double tokens, chosen; /* in sight of the last row; of those, chosen at most */
    double queries; /* a kv head has */
    double lists;
    bool staged; /* sketches, or upper planes, would be read */
} scene;

static double min_f64(double a, double b) { return a < b ? a : b; }

static scene scene_of(const cxlkv_batch *batch, const cxlkv_select_args *args, uint32_t i) {
    const layer_shape *shape = shape_of(batch->pool, args->layer);
    const cxlkv_layout *layout = &shape->layout;
    const cxlkv_budget *budget = &args->by.budgets[args->by.budget_count == 1 ? 0 : i];
    layer_view view = view_of(batch->sequences[i], args->layer);
    uint64_t rows = (uint64_t)(args->starts[i + 1] - args->starts[i]);
    uint64_t seen = view.window ? min_u64(view.tokens, view.window) : view.tokens;
    scene s = {.tokens = (double)seen,
               .queries = (double)(rows * (args->q_heads / layout->kv_heads)),
               .lists = args->by.per == CXLKV_PER_QUERY ? (double)rows : 1};
    double forced = (double)(budget->sinks + budget->recent + 1) * layout->page_tokens;
    double wanted = budget->kind == CXLKV_BUDGET_SHARE ? budget->amount * s.tokens
                    : budget->kind == CXLKV_BUDGET_PAGES
                        ? (double)budget->pages * layout->page_tokens
                        : s.tokens;
    s.chosen = min_f64(wanted > forced ? wanted : forced, s.tokens);
    s.staged = sketch_pays(shape, (uint32_t)(seen / layout->page_tokens)) &&
               2 * s.chosen <= s.tokens;
    return s;
}

static double products_ns(double queries, double channels, double rate) {
    double fours = queries < 4 ? 4 : queries; /* as kernels take them */
    return fours * channels / rate;
}

static double key_rate(const cxlkv_layout *layout, const kernel_rates *rates) {
    return has_codes(layout, PIECE_KEYS) ? rates->code_score
                                         : rates->score[kernel_dtype(layout, PIECE_KEYS)];
}

/* Of `tokens` of a head. */
static work attending(const cxlkv_layout *layout, const scene *s, double tokens) {
    const kernel_rates *rates = &kernels_current()->rates;
    bool codes = has_codes(layout, PIECE_VALUES);
    double values = codes ? rates->code_accumulate : rates->accumulate;
    double compute = products_ns(s->queries, layout->head_dim, key_rate(layout, rates)) +
                     s->queries * layout->value_head_dim / values;
    return (work){.read_bytes = tokens * (double)token_bytes(layout),
                  .compute_ns = tokens * ATTEND_REST * compute};
}

static work scoring(const cxlkv_layout *layout, const scene *s) {
    double rate = key_rate(layout, &kernels_current()->rates);
    return (work){.read_bytes = s->tokens * (double)kind_token_bytes(layout, PIECE_KEYS),
                  .compute_ns = s->tokens * products_ns(s->queries, layout->head_dim, rate)};
}

/* Upper planes of all keys, then both planes of the blocks of 16 that may matter: on even keys as
 * many again as are chosen. */
static work estimating_by_planes(const cxlkv_layout *layout, const scene *s) {
    code_form form = form_of(layout, PIECE_KEYS), upper = code_upper(&form);
    double each = (double)kind_token_bytes(layout, PIECE_KEYS);
    double keys = s->lists * min_f64(2 * s->chosen + 128, s->tokens);
    work made = scoring(layout, s);
    made.read_bytes -= s->tokens * (double)code_block_bytes(&upper) / CODE_TOKENS;
    made.read_bytes += keys * each;
    made.wait_ns = keys / CODE_TOKENS * 2 * KEY_NS;
    return made;
}

/* Sketches of all tokens, then the keys of some: on even keys of half as many as are chosen. */
static work estimating(const cxlkv_layout *layout, const scene *s, double errors) {
    double blocks = s->tokens / SKETCH_TOKENS, keys = s->chosen * (0.2 + errors / 8) + 128;
    double rate = kernels_current()->rates.estimate;
    double each = (double)kind_token_bytes(layout, PIECE_KEYS);
    keys = s->lists * min_f64(keys, s->tokens);
    return (work){.read_bytes = blocks * (double)sketch_block_bytes(layout->head_dim) + keys * each,
                  .compute_ns = s->tokens * s->queries * layout->head_dim / rate,
                  .wait_ns = keys * KEY_NS};
}

static double time_of(const cxlkv_pool *pool, double read_rate, work w) {
    double threads = pool->threads.count, usual = threads < READ_THREADS ? threads : READ_THREADS;
    double read_ns = w.read_bytes / (read_rate > 0 ? read_rate : READ_RATE * usual);
    double compute_ns = w.compute_ns / threads;
    return (read_ns > compute_ns ? read_ns : compute_ns) + w.wait_ns / threads;
}

uint32_t cheapest_method(cxlkv_batch *batch, const cxlkv_select_args *args, bool may_skip) {
    const cxlkv_pool *pool = batch->pool;
    double all = 0, exact = 0, staged = 0;
    bool any_mass = false;
    for (uint32_t i = 0; i < args->by.budget_count; i++)
        any_mass |= args->by.budgets[i].kind == CXLKV_BUDGET_MASS;
    /* What is wrong is said by the select. */
    if (any_mass || args->layer >= pool->layout.layers || batch_lock(batch, false) < 0)
        return CXLKV_METHOD_EXACT;
    const cxlkv_layout *layout = layout_of(pool, args->layer);
    const double heads = layout->kv_heads;
    for (uint32_t i = 0; i < batch->count; i++) {
        scene s = scene_of(batch, args, i);
        if (s.queries == 0) continue;
        double choosing = s.lists * (LIST_NS + PAGE_NS * s.tokens / pool->layout.page_tokens);
        double chosen = time_of(pool, args->by.read_rate, attending(layout, &s, s.chosen)) +
                        choosing / pool->threads.count;
        double scored = time_of(pool, args->by.read_rate, scoring(layout, &s));
        all += heads * time_of(pool, args->by.read_rate, attending(layout, &s, s.tokens));
        exact += heads * (scored + chosen);
        if (s.staged) {
            work staging = pool->layout.sketch ? estimating(layout, &s, args->by.errors)
                                               : estimating_by_planes(layout, &s);
            scored = time_of(pool, args->by.read_rate, staging) + choosing / pool->threads.count;
        }
        staged += heads * (scored + chosen);
    }
    batch_unlock(batch);
    uint32_t best = staged < exact ? CXLKV_METHOD_TWO_STAGE : CXLKV_METHOD_EXACT;
    return may_skip && all <= min_f64(exact, staged) ? CXLKV_METHOD_ALL : best;
}
