/* Attend that reads lower planes only where an error that the caller allows asks for them.
 *
 * All pages are scored by the upper planes of their keys. That gives each page's share m of a
 * query's softmax. Rounding to a step is off by step^2 / 12 in the mean square of a channel, so
 * that by the upper plane a logit is off by s, s^2 = scale^2 |q|^2 (16 * a token's scale)^2 / 12,
 * and a value by r of its length, r^2 = 0.0108. An output moves by m * s of the values' length for
 * a page whose logits are off, by m * r where its values are. Shares sum to 1: over the pages where
 * m * s^2 is below a limit, the sum of (m * s)^2 is below it, too. So lower planes are read where
 * m * s^2, or m * r^2, is at least half of error^2 (all of it where only keys, or only values, have
 * planes). docs/decisions/0035-progressive.md has how near to that models come.
 *
 * Pages that not all rows see whole, the newest among them, are read in 8 bits anyway. */
#include <math.h>

#include "ndp/attend_mass.h"
#include "ndp/attend_planes.h"
#include "ndp/attend_walk.h"
#include "ndp/stored.h"
#include "sequence/batch.h"

static const float VALUES_SQUARED = 0.0108f; /* r^2 */

/* ---- scratch ---- */

/* Of a block: the largest scale of each page and head, then logits [head][query][token]. */
static uint64_t scale_floats(const span *s, uint64_t pages) { return pages * s->head_count; }

uint64_t planes_span_floats(const attend_job *job, const span *s) {
    uint64_t pages = s->page_last - s->page_first, queries = s->head_count * span_queries(job, s);
    return 2 * queries + scale_floats(s, pages) + pages * job->layout->page_tokens * queries;
}

/* What a span has measured, {m, l} by head and query, is before its blocks. */
static float (*measured_of(const attend_job *job, const span *s, uint32_t head))[2] {
    return (float(*)[2])s->upper + head * span_queries(job, s);
}

static float *blocks_of(const attend_job *job, const span *s) {
    return s->upper + 2 * s->head_count * span_queries(job, s);
}

void planes_prepare(attend_job *job) {
    uint32_t dim = job->layout->head_dim;
    float scale = job->args->scale, step = CODE_UPPER_STEP;
    for (uint64_t q = 0; q < job->queries.total; q++) {
        const float *row = job->queries.rows + q * dim;
        float squares = 0;
        for (uint32_t d = 0; d < dim; d++) squares += row[d] * row[d];
        job->spreads[q] = job->keys.planes ? scale * scale * squares * step * step / 12 : 0;
    }
}

static bool is_whole(const attend_job *job, const span *s, const page_block *block) {
    return block->whole && span_queries(job, s) <= SPAN_QUERIES;
}

/* ---- measuring ---- */

/* Of a page's tokens. Those of codes that are NaN are above all others. */
static float largest_scale(const stored *s, const uint8_t *piece, uint32_t tokens) {
    const uint16_t *scales = stored_codes(s, piece).scales;
    int16_t most = 0; /* halves that are not negative have the order of their bits */
    float found;
    for (uint32_t t = 0; t < tokens; t++) {
        int16_t its = (int16_t)scales[t];
        most = its > most ? its : most;
    }
    s->isa->to_float(CXLKV_FLOAT16, &most, 1, &found);
    return found;
}

/* One head of one page, by the upper plane of its keys, or by all that it has. */
static void score_upper(const attend_job *job, const uint8_t *piece, uint32_t tokens,
                        size_t row_bytes, const kernel_queries *queries, float *logits,
                        size_t stride, const uint8_t *next) {
    const stored *keys = &job->keys;
    if (!keys->planes) {
        stored_score(keys, piece, row_bytes, 0, tokens, queries, job->args->scale, logits, stride,
                     next);
        return;
    }
    keys->isa->code_score(&keys->upper, stored_codes(keys, piece), 0, tokens,
                          stored_queries(queries), queries->count, logits, stride, next);
    for (uint32_t q = 0; q < queries->count; q++)
        for (uint32_t t = 0; t < tokens; t++) logits[q * stride + t] *= CODE_UPPER_STEP;
}

static void measure_block(const span_walk *w, const page_block *block, const page_block *later,
                          float *at, float *room) {
    const attend_job *job = w->job;
    const span *s = w->s;
    uint32_t queries = (uint32_t)span_queries(job, s), tokens = block->tokens;
    float *scales = at, *logits = at + scale_floats(s, block->count);
    for (uint32_t i = 0, done = 0; i < block->count; done += block->held[i], i++)
        for (uint32_t head = 0; head < s->head_count; head++) {
            uint32_t own = s->head_first + head;
            const uint8_t *piece = piece_at(block, block->keys, i, own);
            kernel_queries asked =
                queries_range(job->queries, first_query_of(job, s, head), queries);
            scales[i * s->head_count + head] =
                job->keys.planes ? largest_scale(&job->keys, piece, block->held[i]) : 0;
            score_upper(job, piece, block->held[i], block->keys[i].row_bytes, &asked,
                        logits + (uint64_t)head * queries * tokens + done, tokens,
                        piece_at(later, later->keys, i, own));
        }
    for (uint32_t head = 0; head < s->head_count; head++) {
        memcpy(room, logits + (uint64_t)head * queries * tokens,
               (uint64_t)queries * tokens * sizeof(float));
        softmax_state state = {.states = measured_of(job, s, head)};
        online_softmax(job, room, tokens, queries, &state);
    }
}

/* Where the next block begins. */
static float *behind(const attend_job *job, const span *s, const page_block *block, float *at) {
    return at + scale_floats(s, block->count) +
           s->head_count * span_queries(job, s) * block->tokens;
}

int planes_measure_task(void *context, uint32_t item) {
    const attend_job *job = context;
    const span *s = &job->spans[item];
    span_walk walk = {.job = job, .s = s, .at = s->page_first, .step = block_pages(job, s),
                      .view = view_of(job->batch->sequences[s->sequence], job->args->layer),
                      .rows = (uint64_t)(job->args->starts[s->sequence + 1] -
                                         job->args->starts[s->sequence])};
    walk.view.local = tier_of(job->batch->pool);
    uint32_t wide = job->layout->page_tokens;
    if (wide < BLOCK_TOKENS) wide = BLOCK_TOKENS;
    float *room = malloc((uint64_t)SPAN_QUERIES * wide * sizeof(*room)), *at = blocks_of(job, s);
    if (!room) return fail(ENOMEM, "no memory for logits");
    for (uint64_t i = 0; i < s->head_count * span_queries(job, s); i++) {
        s->upper[2 * i] = -INFINITY;
        s->upper[2 * i + 1] = 0;
    }
    page_block blocks[2];
    int code = block_take(&walk, &blocks[0]);
    for (uint32_t i = 0; code == 0 && blocks[i].count; i ^= 1) {
        code = block_take(&walk, &blocks[i ^ 1]);
        if (code == 0) code = block_verify(&walk, &blocks[i]);
        if (code < 0 || !is_whole(job, s, &blocks[i])) continue;
        measure_block(&walk, &blocks[i], &blocks[i ^ 1], at, room);
        at = behind(job, s, &blocks[i], at);
    }
    free(room);
    return code;
}

void planes_totals(const attend_job *job, const span *s, float (*totals)[2]) {
    const merge *m = &job->merges[s->merge];
    for (uint64_t i = 0; i < s->head_count * span_queries(job, s); i++) {
        float largest = -INFINITY, sum = 0;
        for (uint32_t part = 0; part < m->count; part++) {
            const float *its = job->spans[m->first + part].upper + 2 * i;
            if (its[0] > largest) largest = its[0];
        }
        for (uint32_t part = 0; part < m->count; part++) {
            const float *its = job->spans[m->first + part].upper + 2 * i;
            sum += its[0] == -INFINITY ? its[1] : its[1] * expf(its[0] - largest);
        }
        totals[i][0] = largest;
        totals[i][1] = largest + logf(sum);
    }
}

/* ---- which lower planes ---- */

/* One head of one page: its logits are rows[query * stride]. */
typedef struct head_page {
    const attend_job *job;
    float *rows;
    uint32_t stride, tokens, queries;
    float (*totals)[2];          /* of each query */
    float *room;                 /* for the logits of a query */
    const float *spreads;        /* of each query */
    float scale_squared;         /* the largest of a token */
} head_page;

/* A logit above which the page may have so large a share that share * worth >= limit. */
static float logit_wanted(const head_page *p, uint32_t q, float worth, float limit) {
    return p->totals[q][1] + logf(limit / (worth * (float)p->job->layout->page_tokens));
}

static bool has_share(const head_page *p, uint32_t q, float share) {
    const float *row = p->rows + (uint64_t)q * p->stride;
    memcpy(p->room, row, p->tokens * sizeof(*row));
    cap_logits(p->job, p->room, p->tokens);
    float log_sum = p->totals[q][1], sum = p->job->isa->exp_sum(p->room, p->tokens, log_sum);
    return !(sum < share); /* nor of a NaN */
}

/* A share that was measured by logits that are off by s is itself off by a factor of exp(s), which
 * few standard deviations make large: from s^2 = 1/4 on the mean square of what it moves by grows
 * nearly as s^2 exp(2 s^2), that of a lognormal number. Returns the log of what s^2 lacks. */
static float log_more(const head_page *p, uint32_t q) {
    float squared = p->spreads[q] * p->scale_squared;
    return squared > 0.25f ? 2 * squared - 0.5f : 0;
}

/* Whether share * worths[q] * factor >= limit for some query, log_more() aside; worths NULL: 1. Few
 * pages come near it, which the largest logit tells; under a softcap it does not. */
static bool is_wanted(const head_page *p, const float *wanted, const float *worths, float factor,
                      float limit) {
    float nearest = -INFINITY, most = logf(factor);
    bool looks = p->job->args->softcap > 0;
    for (uint32_t q = 0; q < p->queries && !looks; q++) {
        const float *row = p->rows + (uint64_t)q * p->stride;
        float best = -INFINITY;
        for (uint32_t t = 0; t < p->tokens; t++) best = row[t] > best ? row[t] : best;
        float near = best - wanted[q] + log_more(p, q);
        nearest = near > nearest ? near : nearest;
    }
    if (!looks && nearest + most < 0) return false;
    for (uint32_t q = 0; q < p->queries; q++)
        if (has_share(p, q, limit / ((worths ? worths[q] : 1) * factor) *
                                expf(-log_more(p, q))))
            return true;
    return false;
}

/* ---- attending ---- */

/* What of error^2 keys and values may have. */
static float limit_of(const attend_job *job) {
    float error = job->args->error;
    return error * error / (job->keys.planes && job->values.planes ? 2 : 1);
}

static code_piece lower_of(const stored *s, const uint8_t *piece) {
    code_piece made = stored_codes(s, piece);
    made.blocks += s->lower_offset;
    return made;
}

static uint64_t upper_token_bytes(const attend_job *job, uint32_t kind) {
    const stored *s = kind == PIECE_KEYS ? &job->keys : &job->values;
    return kind_token_bytes(job->layout, kind) -
           (s->planes ? code_block_bytes(&s->upper) / CODE_TOKENS : 0);
}

static uint64_t lower_bytes(const stored *s, uint32_t tokens) {
    return code_blocks(tokens) * code_block_bytes(&s->upper);
}

/* Adds what the lower plane of the keys says. */
static void refine(const head_page *p, const uint8_t *piece, uint64_t first_query) {
    const stored *keys = &p->job->keys;
    kernel_queries all = queries_range(p->job->queries, first_query, p->queries);
    keys->isa->code_score(&keys->upper, lower_of(keys, piece), 0, p->tokens,
                          stored_queries(&all), p->queries, p->room, p->tokens, NULL);
    for (uint32_t q = 0; q < p->queries; q++)
        for (uint32_t t = 0; t < p->tokens; t++)
            p->rows[(uint64_t)q * p->stride + t] += p->room[q * p->tokens + t];
}

/* Refines the logits of a head's pages; a bit for each whose values are wanted in 8 bits. */
static uint32_t refine_head(const span_walk *w, const page_block *block, uint32_t head,
                            const float *scales, head_page *p, uint64_t *bytes) {
    const attend_job *job = w->job;
    uint64_t first_query = first_query_of(job, w->s, head);
    const float limit = limit_of(job), *spreads = job->spreads + first_query;
    float *rows = p->rows, keys[SPAN_QUERIES], values[SPAN_QUERIES];
    uint32_t found = 0;
    for (uint32_t q = 0; q < p->queries; q++) {
        keys[q] = logit_wanted(p, q, spreads[q], limit);
        values[q] = logit_wanted(p, q, 1, limit);
    }
    for (uint32_t i = 0, done = 0; i < block->count; done += block->held[i], i++) {
        float scale = scales[i * w->s->head_count + head];
        p->rows = rows + done;
        p->tokens = block->held[i];
        p->scale_squared = scale * scale;
        if (job->keys.planes &&
            is_wanted(p, keys, spreads, p->scale_squared, limit)) {
            refine(p, piece_at(block, block->keys, i, w->s->head_first + head), first_query);
            *bytes += lower_bytes(&job->keys, p->tokens);
        }
        if (job->values.planes &&
            is_wanted(p, values, NULL, VALUES_SQUARED, limit))
            found |= 1u << i;
    }
    return found;
}

static void accumulate_values(const span_walk *w, const page_block *block,
                              const page_block *later, uint32_t head, uint32_t wanted,
                              float *weights, uint64_t *bytes) {
    const attend_job *job = w->job;
    const stored *values = &job->values;
    uint32_t queries = (uint32_t)span_queries(job, w->s), own = w->s->head_first + head;
    float *sums = accumulator_of(job, w->s, head);
    for (uint32_t i = 0, done = 0; i < block->count; done += block->held[i], i++) {
        if (!(wanted >> i & 1)) continue;
        code_piece lower = lower_of(values, piece_at(block, block->values, i, own));
        values->isa->code_accumulate(&values->upper, lower, 0, block->held[i], weights + done,
                                     block->tokens, queries, sums, NULL);
        *bytes += lower_bytes(values, block->held[i]);
    }
    for (uint64_t i = 0; values->planes && i < (uint64_t)queries * block->tokens; i++)
        weights[i] *= CODE_UPPER_STEP;
    for (uint32_t i = 0, done = 0; i < block->count; done += block->held[i], i++) {
        const uint8_t *piece = piece_at(block, block->values, i, own);
        const uint8_t *next = piece_at(later, later->values, i, own);
        if (values->planes)
            values->isa->code_accumulate(&values->upper, stored_codes(values, piece), 0,
                                         block->held[i], weights + done, block->tokens, queries,
                                         sums, next);
        else
            stored_accumulate(values, piece, block->values[i].row_bytes, 0, block->held[i],
                              weights + done, block->tokens, queries, sums, next);
    }
}

float *planes_attend_block(const span_walk *w, const page_block *block, const page_block *later,
                           float *at, float (*totals)[2], float *room, uint64_t *bytes) {
    const attend_job *job = w->job;
    const span *s = w->s;
    uint32_t queries = (uint32_t)span_queries(job, s);
    float *logits = at + scale_floats(s, block->count);
    for (uint32_t head = 0; head < s->head_count; head++) {
        float *rows = logits + (uint64_t)head * queries * block->tokens;
        head_page page = {.job = job, .rows = rows, .stride = block->tokens, .queries = queries,
                          .totals = totals + head * queries, .room = room,
                          .spreads = job->spreads + first_query_of(job, s, head)};
        uint32_t wanted = refine_head(w, block, head, at, &page, bytes);
        softmax_state state = mass_state(w, block->at[0], head, 0);
        online_softmax(job, rows, block->tokens, queries, &state);
        if (s->sums) mass_of_block(w, block, head, 1, rows);
        accumulate_values(w, block, later, head, wanted, rows, bytes);
        *bytes += block->tokens *
                  (upper_token_bytes(job, PIECE_KEYS) + upper_token_bytes(job, PIECE_VALUES));
    }
    return behind(job, s, block, at);
}
