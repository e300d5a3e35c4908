/* Which pages go: those of lowest priority, then of lowest score, leaves of the prefix tree first.
 * Only arrays are read. A page whose children stay must stay: without it they could not be found.
 * So it stays as long as the highest priority behind it. What cannot be found already goes before
 * all else of its priority. */
#include "base/types.h"

typedef struct candidates {
    const uint8_t *priorities;
    const float *scores;
    const uint32_t *ages;
    uint8_t *lost;               /* of each page: one before it is not there */
    uint32_t *heap;              /* leaves, the one that goes next at the top */
    uint32_t size;
} candidates;

/* A total order, so that equal calls choose alike. */
static bool goes_before(const candidates *c, uint32_t a, uint32_t b) {
    if (c->priorities[a] != c->priorities[b]) return c->priorities[a] < c->priorities[b];
    if (c->lost[a] != c->lost[b]) return c->lost[a];
    if (c->scores[a] != c->scores[b]) return c->scores[a] < c->scores[b];
    if (c->ages[a] != c->ages[b]) return c->ages[a] > c->ages[b];
    return a < b;
}

static void sift_down(candidates *c, uint32_t at) {
    uint32_t moved = c->heap[at];
    for (uint32_t child; (child = 2 * at + 1) < c->size; at = child) {
        if (child + 1 < c->size && goes_before(c, c->heap[child + 1], c->heap[child])) child++;
        if (!goes_before(c, c->heap[child], moved)) break;
        c->heap[at] = c->heap[child];
    }
    c->heap[at] = moved;
}

static void push(candidates *c, uint32_t page) {
    uint32_t at = c->size++;
    for (uint32_t up; at > 0 && goes_before(c, page, c->heap[up = (at - 1) / 2]); at = up)
        c->heap[at] = c->heap[up];
    c->heap[at] = page;
}

static uint32_t pop(candidates *c) {
    uint32_t top = c->heap[0];
    c->heap[0] = c->heap[--c->size];
    if (c->size) sift_down(c, 0);
    return top;
}

/* Each page is visited twice: on the way up to one that is known, and down again. */
static void find_lost(candidates *c, uint32_t count, const uint32_t *parents) {
    enum { UNKNOWN = 2, VISITED = 3 };
    uint32_t lost = 0;
    for (uint32_t page = 0; page < count; page++) lost += parents[page] == CXLKV_PARENT_LOST;
    if (lost == 0) return;
    memset(c->lost, UNKNOWN, count);
    for (uint32_t page = 0; page < count; page++) {
        uint32_t up = page;
        for (; up < count && c->lost[up] == UNKNOWN; up = parents[up]) c->lost[up] = VISITED;
        uint8_t found = up == CXLKV_PARENT_LOST || (up < count && c->lost[up] == 1);
        for (up = page; up < count && c->lost[up] == VISITED; up = parents[up])
            c->lost[up] = found;
    }
}

/* children counts those that are still there: in a cycle, which no chain has, nothing is a leaf. */
static uint32_t choose_into(candidates *c, uint32_t count, const uint32_t *parents,
                            const uint8_t *blocked, uint32_t *children, uint32_t wanted,
                            uint32_t *chosen) {
    for (uint32_t page = 0; page < count; page++)
        if (parents[page] < count) children[parents[page]]++;
    for (uint32_t page = 0; page < count; page++)
        if (!children[page] && !blocked[page]) c->heap[c->size++] = page;
    for (uint32_t at = c->size / 2; at-- > 0;) sift_down(c, at);
    uint32_t taken = 0;
    while (taken < wanted && c->size) {
        uint32_t page = pop(c), parent = parents[page];
        chosen[taken++] = page;
        if (parent < count && --children[parent] == 0 && !blocked[parent]) push(c, parent);
    }
    return taken;
}

int64_t cxlkv_evict_order(uint32_t count, const uint8_t *priorities, const float *scores,
                          const uint32_t *ages, const uint32_t *parents, const uint8_t *blocked,
                          uint32_t wanted, uint32_t *chosen) {
    int code = need(count, "priorities", priorities, "scores", scores, "ages", ages, "parents",
                    parents, "blocked", blocked, NULL);
    if (code == 0) code = need(min_u32(count, wanted), "chosen", chosen, NULL);
    if (code < 0) return code;
    for (uint32_t page = 0; page < count; page++)
        if (scores[page] != scores[page])
            return fail(CXLKV_E_ARGUMENT, "choose: the score of page %u is not a number", page);
    candidates c = {.priorities = priorities, .scores = scores, .ages = ages};
    c.heap = malloc(((size_t)count + 1) * sizeof(*c.heap));
    c.lost = calloc((size_t)count + 1, sizeof(*c.lost));
    uint32_t *children = calloc((size_t)count + 1, sizeof(*children));
    int64_t taken;
    if (c.heap && c.lost && children) {
        find_lost(&c, count, parents);
        taken = choose_into(&c, count, parents, blocked, children, wanted, chosen);
    } else {
        taken = fail(ENOMEM, "no memory to choose among %u pages", count);
    }
    free(c.heap);
    free(c.lost);
    free(children);
    return taken;
}
