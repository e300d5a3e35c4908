/* What an attend walks over, a span's pages block by block, and its online softmax. */
#include <math.h>

#include "ndp/attend_walk.h"
#include "sequence/batch.h"

/* The page at position `at`; -1: none that is seen. */
static int64_t page_at(const span_walk *w, uint32_t at) {
    int64_t index = w->s->pages ? w->s->pages[at] : (int64_t)at;
    if (index >= w->s->gap_first) index += w->s->gap_pages;
    if (index == -1 && w->s->pages) return -1;
    if (index < 0 || index >= w->view.pages)
        return fail(CXLKV_E_ARGUMENT, "attend: page %ld, the sequence has %u", index,
                    w->view.pages);
    return index < w->view.first ? -1 : index; /* behind the window of every row */
}

static const float *weights_at(const span_walk *w, uint32_t at) {
    const cxlkv_picked *picked = &w->job->args->picked;
    return picked->log_weights + (w->s->list * picked->k + at) * picked->weight_tokens;
}

static bool is_left_out(const span_walk *w, uint32_t at) {
    const float *weights = weights_at(w, at);
    uint32_t left = 0, count = w->job->args->picked.weight_tokens;
    for (uint32_t t = 0; t < count; t++) left += weights[t] == -INFINITY;
    return left == count;
}

int block_take(span_walk *w, page_block *block) {
    block->count = block->tokens = 0;
    block->whole = true;
    for (; w->at < w->s->page_last && block->count < w->step; w->at++) {
        int64_t index = page_at(w, w->at);
        if (index == -1 || (index >= 0 && w->weights && is_left_out(w, w->at))) continue;
        if (index < 0) return (int)index;
        uint32_t i = block->count++;
        block->at[i] = w->at;
        block->index[i] = (uint32_t)index;
        block->held[i] = view_filled(&w->view, (uint32_t)index);
        block->tokens += block->held[i];
        block->keys[i] = view_rows(&w->view, (uint32_t)index, PIECE_KEYS);
        block->values[i] = view_rows(&w->view, (uint32_t)index, PIECE_VALUES);
        block->whole &= w->s->shared || view_whole(&w->view, (uint32_t)index, w->s->row_first,
                                                   w->s->row_count, w->rows);
    }
    return 0;
}

int block_verify(const span_walk *w, const page_block *block) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < block->count; i++)
        if (!block->keys[i].local) code = view_verify(&w->view, block->index[i]);
    return code;
}

int block_weigh(const span_walk *w, const page_block *block) {
    uint32_t each = w->job->args->picked.weight_tokens > 1;
    float *to = w->weights;
    bool wrong = false;
    for (uint32_t i = 0; i < block->count; to += block->held[i++]) {
        const float *from = weights_at(w, block->at[i]);
        for (uint32_t t = 0; t < block->held[i]; t++) {
            to[t] = from[t * each];
            wrong |= !(to[t] < INFINITY);
        }
    }
    if (!wrong) return 0;
    return fail(CXLKV_E_ARGUMENT, "attend: log_weights have NaN or infinity in list %lu of kv "
                "head %u: numbers and -infinity are wanted",
                w->s->list / w->job->layout->kv_heads, w->s->head_first);
}

uint32_t block_pages(const attend_job *job, const span *s) {
    const cxlkv_layout *layout = job->layout;
    uint64_t bytes = token_bytes(layout) * layout->page_tokens * s->head_count;
    uint64_t pages = min_u64(BLOCK_TOKENS / layout->page_tokens, BLOCK_BYTES / bytes);
    return (uint32_t)min_u64(BLOCK_PAGES, pages ? pages : 1);
}

/* logits[tokens] of one query to weights; raises the query's maximum, rescales its sum. */
static float softmax_row(const kernels *isa, float *logits, uint32_t tokens, float state[2]) {
    float largest = state[0], factor = 1;
    bool broken = false;
    for (uint32_t t = 0; t < tokens; t++) {
        if (logits[t] > largest) largest = logits[t];
        broken |= isnan(logits[t]);
    }
    if (broken) state[1] = NAN; /* as full attention would: such a key spoils the output, visibly */
    if (largest == -INFINITY) {
        memset(logits, 0, tokens * sizeof(float));
        return 1;
    }
    if (largest > state[0]) factor = state[0] == -INFINITY ? 0.0f : expf(state[0] - largest);
    state[0] = largest;
    state[1] = state[1] * factor + isa->exp_sum(logits, tokens, largest);
    return factor;
}

void cap_logits(const attend_job *job, float *logits, uint64_t count) {
    float cap = job->args->softcap;
    for (uint64_t i = 0; cap > 0 && i < count; i++) logits[i] = cap * tanhf(logits[i] / cap);
}

static void rescale(float *values, uint64_t count, float factor) {
    for (uint64_t i = 0; i < count; i++) values[i] *= factor;
}

static void softmax_rows(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                         const softmax_state *state) {
    enum { TOGETHER = 4 };
    uint32_t value_dim = job->layout->value_head_dim;
    float factors[TOGETHER];
    for (uint32_t first = 0; first < count; first += TOGETHER) {
        uint32_t here = min_u32(TOGETHER, count - first);
        float *rows = logits + (uint64_t)first * tokens;
        bool done = job->isa->online_softmax &&
                    job->isa->online_softmax(rows, tokens, here, state->states + first, factors);
        if (!done)
            for (uint32_t i = 0; i < here; i++)
                factors[i] = softmax_row(job->isa, rows + (uint64_t)i * tokens, tokens,
                                         state->states[first + i]);
        for (uint32_t i = 0; i < here; i++) {
            if (factors[i] == 1) continue; /* nearly always, after the first pages */
            uint64_t query = first + i;
            if (state->accumulator)
                rescale(state->accumulator + query * value_dim, value_dim, factors[i]);
            if (state->sum_count)
                rescale(state->sums + query * state->sum_stride, state->sum_count, factors[i]);
        }
    }
}

static uint32_t count_kept(const float *weights, uint32_t tokens) {
    uint32_t kept = 0;
    for (uint32_t t = 0; t < tokens; t++) kept += weights[t] != -INFINITY;
    return kept;
}

/* Rows of `tokens` logits to rows of those that are kept, with their weights. Masks are random:
 * what is not kept is written, too, and the next one over it, so that there is no branch. */
static void close_up(float *logits, uint32_t tokens, uint32_t count, const float *weights) {
    float *to = logits;
    for (uint32_t q = 0; q < count; q++, logits += tokens)
        for (uint32_t t = 0; t < tokens; t++) {
            *to = logits[t] + weights[t];
            to += weights[t] != -INFINITY;
        }
}

/* And back, with 0 for the others: from the end on, where no row is read any more. */
static void spread_out(float *logits, uint32_t tokens, uint32_t kept, uint32_t count,
                       const float *weights) {
    const float *from = logits + (uint64_t)count * kept;
    for (uint32_t q = count; q-- > 0;)
        for (uint32_t t = tokens; t-- > 0;) {
            uint32_t is_kept = weights[t] != -INFINITY, bits;
            from -= is_kept;
            memcpy(&bits, from, sizeof(bits));
            bits &= 0 - is_kept;
            memcpy(logits + (uint64_t)q * tokens + t, &bits, sizeof(bits));
        }
}

/* Tokens that are left out do not go along: their keys do not matter, NaN or not, and exponentials
 * that come to 0 are slow. */
static void weighted_softmax(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                             const softmax_state *state) {
    const float *weights = state->log_weights;
    uint32_t kept = count_kept(weights, tokens);
    if (kept == tokens) {
        for (uint32_t q = 0; q < count; q++)
            for (uint32_t t = 0; t < tokens; t++) logits[(uint64_t)q * tokens + t] += weights[t];
        softmax_rows(job, logits, tokens, count, state);
    } else if (kept == 0) {
        memset(logits, 0, (uint64_t)count * tokens * sizeof(float));
    } else {
        close_up(logits, tokens, count, weights);
        softmax_rows(job, logits, kept, count, state);
        spread_out(logits, tokens, kept, count, weights);
    }
}

void online_softmax(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                    const softmax_state *state) {
    cap_logits(job, logits, (uint64_t)count * tokens);
    if (state->log_weights) weighted_softmax(job, logits, tokens, count, state);
    else softmax_rows(job, logits, tokens, count, state);
}
