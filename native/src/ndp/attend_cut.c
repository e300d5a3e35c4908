/* What an attend's work is cut into, and which sequences' pages it reads once for all of them.
 *
 * The same for any number of threads: where the sums are cut decides their last bits. */
#include "ndp/attend_cut.h"
#include "sequence/batch.h"

enum { SPAN_TOKENS_MIN = 512, SPANS_WANTED = 128 };

/* A sequence joins a group if so many pages are shared. Where its own ones begin is rounded, so
 * that no span of a group has few. */
enum { GROUP_PAGES_MIN = 64, GROUP_PAGES_STEP = 16 };

static uint64_t rows_of(const attend_job *job, uint32_t sequence) {
    return (uint64_t)(job->args->starts[sequence + 1] - job->args->starts[sequence]);
}

/* ---- groups ---- */

static sharer sharer_of(const attend_job *job, uint32_t sequence) {
    uint64_t page_tokens = job->layout->page_tokens;
    sharer made = {.view = view_of(job->batch->sequences[sequence], job->args->layer),
                   .rows = rows_of(job, sequence)};
    if (made.rows == 0) return made;
    uint64_t low = view_low(&made.view, made.rows - 1, made.rows);
    made.first = (uint32_t)((low + page_tokens - 1) / page_tokens);
    made.view.complete = (uint32_t)((made.view.tokens - made.rows + 1) / page_tokens);
    made.group_rows = made.rows;
    return made;
}

/* Followers are kept by how much they share, most first. The group's first page is the last one of
 * any member's: windows begin where they do. */
static bool join(sharer *leader, sharer *s, uint32_t group) {
    uint64_t rows = leader->group_rows + s->rows;
    if (leader->leader || leader->rows == 0 || rows * group > SPAN_QUERIES) return false;
    uint32_t first = leader->first > s->first ? leader->first : s->first;
    uint32_t end = views_shared(&leader->view, &s->view, first), least;
    least = end -= end % GROUP_PAGES_STEP;
    sharer **at = &leader->follower, **place = NULL;
    for (; *at; at = &(*at)->follower) {
        if (!place && (*at)->end < end) place = at;
        least = min_u32(least, (*at)->end);
    }
    if (least < first + GROUP_PAGES_MIN) return false;
    if (!place) place = at;
    s->follower = *place;
    *place = s;
    s->leader = leader;
    s->end = end;
    leader->first = first;
    leader->group_rows = rows;
    leader->end = leader->follower->end;
    return true;
}

/* What fills spans by itself gains nothing. */
static bool find_groups(attend_job *job) {
    uint32_t count = job->batch->count;
    bool any = false;
    for (uint32_t i = 0; i < count; i++) {
        sharer *s = &job->sharers[i];
        *s = sharer_of(job, i);
        bool joined = s->rows == 0;
        for (uint32_t j = 0; j < i && !joined; j++) joined = join(&job->sharers[j], s, job->group);
        any |= s->leader != NULL;
    }
    return any;
}

/* Where the rows of groups are packed: those of a group where its leader is in the batch. */
static void order_rows(attend_job *job) {
    int32_t end = 0;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        sharer *leader = &job->sharers[i];
        uint64_t row = 0;
        job->group_starts[i] = end;
        for (sharer *s = leader->follower && !leader->leader ? leader : NULL; s; s = s->follower) {
            int32_t from = job->args->starts[s - job->sharers];
            s->group_row = row;
            for (uint64_t j = 0; j < s->rows; j++, row++)
                job->group_order[end++] = from + (int32_t)j;
        }
    }
    job->group_starts[job->batch->count] = end;
}

static int share(attend_job *job) {
    uint32_t count = job->batch->count;
    if (count < 2) return 0;
    job->sharers = malloc(count * sizeof(*job->sharers));
    if (!job->sharers) return fail(ENOMEM, "no memory for %u sequences that may share", count);
    if (!find_groups(job)) {
        free(job->sharers);
        job->sharers = NULL;
        return 0;
    }
    job->group_starts = malloc((count + 1ull + job->rows) * sizeof(*job->group_starts));
    if (!job->group_starts) return fail(ENOMEM, "no memory for the rows of groups");
    job->group_order = job->group_starts + count + 1;
    order_rows(job);
    return 0;
}

/* ---- spans ---- */

static void put_span(attend_job *job, const span *made) {
    if (job->spans) job->spans[job->span_count] = *made;
    job->span_count++;
}

static void put_merge(attend_job *job, merge made) {
    if (job->merges) job->merges[job->merge_count] = made;
    job->merge_count++;
}

/* A span for each head of pages [low, high), which the first `rows` of a group share; returns in
 * how many parts. */
static uint32_t put_shared(attend_job *job, span made, uint64_t rows, uint32_t low, uint32_t high) {
    uint32_t heads = job->layout->kv_heads;
    uint64_t pages = high - low, wanted = SPANS_WANTED / heads;
    uint32_t parts = (uint32_t)min_u64(pages / GROUP_PAGES_STEP, wanted);
    if (parts == 0) parts = 1;
    made.row_count = rows;
    for (uint32_t part = 0; part < parts; part++) {
        made.page_first = low + (uint32_t)(pages * part / parts);
        made.page_last = low + (uint32_t)(pages * (part + 1) / parts);
        for (made.head_first = 0; made.head_first < heads; made.head_first++) put_span(job, &made);
    }
    return parts;
}

/* Up to where the first follower parts from the group, all rows go together; then those of the
 * others, and so on. */
static void cut_group(attend_job *job, sharer *leader, uint64_t first_query) {
    span made = {.sequence = (uint32_t)(leader - job->sharers), .head_count = 1, .shared = true,
                 .first_query = first_query, .block = query_block(leader->group_rows, job->group)};
    uint32_t low = leader->first;
    for (sharer *s = leader; s; s = s->follower) {
        s->spans = job->span_count;
        s->parts = 0;
    }
    while (low < leader->end) {
        sharer *last = leader;
        for (sharer *s = leader; s && s->end > low; s = s->follower) last = s;
        uint32_t high = last->end;
        uint32_t parts = put_shared(job, made, last->group_row + last->rows, low, high);
        for (sharer *s = leader; s != last->follower; s = s->follower) s->parts += parts;
        low = high;
    }
}

/* How many pages, from *low on, `count` rows from `row` on see; without a window all. */
static uint32_t pages_in_sight(const layer_view *view, uint64_t row, uint64_t count, uint64_t rows,
                               uint32_t *low) {
    uint64_t page_tokens = view->sequence->pool->layout.page_tokens;
    *low = 0;
    if (view->window == 0) return view->pages;
    uint64_t last = view->tokens - rows + row + count - 1;
    *low = (uint32_t)(view_low(view, row, rows) / page_tokens);
    return (uint32_t)(last / page_tokens) + 1 - *low;
}

/* At most `wanted` parts of so many pages and virtual rows, none of them small. */
static uint32_t parts_of(const attend_job *job, uint32_t wanted, uint32_t pages) {
    uint64_t tokens = (uint64_t)pages * job->layout->page_tokens +
                      job->args->picked.row_count;
    return (uint32_t)min_u64(wanted, tokens / SPAN_TOKENS_MIN > 1 ? tokens / SPAN_TOKENS_MIN : 1);
}

/* The pages of a block of rows, in parts; those of a group are left out. */
static void cut_block(attend_job *job, span made) {
    layer_view view = view_of(job->batch->sequences[made.sequence], job->args->layer);
    uint32_t low, parts = job->parts;
    uint32_t pages =
        pages_in_sight(&view, made.row_first, made.row_count, rows_of(job, made.sequence), &low);
    const sharer *s = job->sharers ? &job->sharers[made.sequence] : NULL;
    merge whole = {.first = job->span_count};
    if (s && s->end) {
        made.gap_first = s->leader ? s->leader->first : s->first;
        made.gap_pages = s->end - made.gap_first;
        pages -= made.gap_pages;
        parts = parts_of(job, parts, pages);
        whole.shared = s->spans;
        whole.shared_count = s->parts;
        whole.shared_query = s->group_row * job->group;
    }
    whole.count = parts;
    made.merge = job->merge_count;
    put_merge(job, whole);
    for (uint32_t part = 0; part < parts; part++) {
        made.page_first = low + (uint32_t)((uint64_t)pages * part / parts);
        made.page_last = low + (uint32_t)((uint64_t)pages * (part + 1) / parts);
        put_span(job, &made);
    }
}

static bool is_by_row(const cxlkv_picked *picked) {
    return picked->pages && picked->per == CXLKV_PER_QUERY;
}

/* A list for each head, in parts. */
static void cut_lists(attend_job *job, span made) {
    const cxlkv_picked *picked = &job->args->picked;
    uint32_t heads = job->layout->kv_heads, parts = job->parts;
    uint64_t list = made.sequence;
    if (is_by_row(picked)) list = (uint64_t)job->args->starts[made.sequence] + made.row_first;
    made.head_count = 1;
    for (uint32_t head = 0; head < heads; head++) {
        made.head_first = head;
        made.list = list * heads + head;
        made.pages = picked->pages + made.list * picked->k;
        made.merge = job->merge_count;
        put_merge(job, (merge){.first = job->span_count, .count = parts});
        for (uint32_t part = 0; part < parts; part++) {
            made.page_first = (uint32_t)((uint64_t)picked->k * part / parts);
            made.page_last = (uint32_t)((uint64_t)picked->k * (part + 1) / parts);
            put_span(job, &made);
        }
    }
}

static uint64_t rows_together(const attend_job *job) {
    if (is_by_row(&job->args->picked)) return 1;
    return SPAN_QUERIES / job->group ? SPAN_QUERIES / job->group : 1;
}

static void cut(attend_job *job) {
    const cxlkv_picked *picked = &job->args->picked;
    uint32_t heads = job->layout->kv_heads;
    uint64_t block = rows_together(job), queries = 0, group_queries = 0;
    job->span_count = job->merge_count = 0;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        uint64_t rows = rows_of(job, i);
        span made = {.sequence = i, .head_count = heads, .block = query_block(rows, job->group),
                     .first_query = query_place(rows, job->group, heads, &queries)};
        sharer *s = job->sharers ? &job->sharers[i] : NULL;
        if (s && s->follower && !s->leader)
            cut_group(job, s, query_place(s->group_rows, job->group, heads, &group_queries));
        for (uint64_t row = 0; row < rows; row += block) {
            made.row_first = row;
            made.row_count = min_u64(block, rows - row);
            if (!picked->pages) cut_block(job, made);
            else cut_lists(job, made);
        }
    }
}

/* Blocks of rows, no page being shared; of chosen pages, their lists. */
static uint64_t merges_wanted(const attend_job *job) {
    uint64_t block = rows_together(job), count = 0;
    for (uint32_t i = 0; i < job->batch->count; i++) count += (rows_of(job, i) + block - 1) / block;
    return job->args->picked.pages ? count * job->layout->kv_heads : count;
}

/* The most that rows see. */
static uint32_t pages_most(const attend_job *job) {
    uint32_t pages = 0;
    if (job->args->picked.pages) return job->args->picked.k;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        layer_view view = view_of(job->batch->sequences[i], job->args->layer);
        uint64_t reach = view.window / job->layout->page_tokens + 1;
        uint32_t mine = view.window ? (uint32_t)min_u64(view.pages, reach) : view.pages;
        if (mine > pages) pages = mine;
    }
    return pages;
}

static void choose_parts(attend_job *job) {
    uint64_t merges = merges_wanted(job);
    job->parts = 1;
    if (merges == 0 || merges >= SPANS_WANTED) return;
    uint32_t wanted = (uint32_t)((SPANS_WANTED + merges - 1) / merges);
    job->parts = parts_of(job, wanted, pages_most(job));
}

uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args) {
    const cxlkv_layout *layout = layout_of(batch->pool, args->layer);
    attend_job job = {.batch = batch, .layout = layout, .args = args,
                      .group = args->q_heads / layout->kv_heads};
    choose_parts(&job);
    return job.parts;
}

int attend_cut(attend_job *job) {
    if (job->parts == 0) choose_parts(job);
    uint64_t spans_wanted = merges_wanted(job) * job->parts;
    if (job->parts > 1 && spans_wanted >= 2 * SPANS_WANTED)
        return fail(CXLKV_E_ARGUMENT, "attend: pages in %u parts are %lu spans", job->parts,
                    spans_wanted);
    /* Spans that are shared have no total of their own rows. */
    int code = job->args->picked.pages || job->sparing ? 0 : share(job);
    if (code < 0) return code;
    cut(job);
    span *spans = calloc(job->span_count + 1ull, sizeof(*spans));
    job->merges = calloc(job->merge_count + 1ull, sizeof(*job->merges));
    job->spans = spans;
    if (!spans || !job->merges) return fail(ENOMEM, "no memory for %u spans", job->span_count);
    cut(job);
    return 0;
}

void attend_cut_free(attend_job *job) {
    free(job->sharers);
    free(job->group_starts);
    free(job->spans);
    free(job->merges);
}
