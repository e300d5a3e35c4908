/* What clients ask of the worker near the memory (types.h), and what it answers, as bytes in a
 * slot of the file that docs/reference/memory-layout.md has.
 *
 * A table is what the worker knows of one part of a client's sequence: its complete pages, which it
 * holds. A client names its tables by small numbers and changes them from one version to the next;
 * a select or an attend says which version it means. So page ids cross once, and a step sends
 * queries and what is new in open tails only, which no page has yet. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "cxlkv.h"

#define REQUEST_MAGIC 0x51564b43u /* "CKVQ" */
enum { REQUEST_TABLES = 1, REQUEST_SELECT = 2, REQUEST_MORE = 3, REQUEST_LEAVE = 4,
       REQUEST_ATTEND = 5, REQUEST_CHOOSE = 6, REQUEST_PART = 7 };
enum { REQUEST_TABLES_MAX = 1 << 14, REQUEST_PAGES_MAX = 1 << 24 /* of one sequence */,
       REQUEST_ENTRY_BYTES = 12, REQUEST_PARTS_MAX = 1024,
       REQUEST_RESULT_MAX = 256 << 20 /* bytes of a result */, REQUEST_BYTES_MAX = 16 << 20 };

/* Every request begins with it. `count`: tables or sequences; 0 for the others. */
typedef struct request_head {
    uint32_t magic;
    uint32_t operation;
    uint32_t bytes;              /* of the whole request */
    uint32_t count;
} request_head;
_Static_assert(sizeof(request_head) == 16, "no holes: they are written as they lie");

/* Pages [first, kept) stay as `from` had them, `added` follow; to 0: the table goes. From 0: a new
 * one, with kept equal to first. After the last of these: the entries of the added pages, one table
 * after the other, as in a handle: {generation: 8, page: 4}; then zeros up to a multiple of 8. */
typedef struct request_table {
    uint32_t table;
    uint32_t part;
    uint64_t from, to;           /* versions */
    uint32_t first;              /* pages before it are behind the window */
    uint32_t kept;
    uint32_t added;
    uint32_t reserved;
} request_table;
_Static_assert(sizeof(request_table) == 40, "no holes");

typedef struct request_select {
    uint32_t layer;
    uint32_t q_heads;
    uint32_t dtype;              /* of the queries */
    uint32_t method;
    uint32_t union_over;
    uint32_t per;
    float scale;
    float errors;
    uint32_t rows;               /* of all sequences */
    uint32_t budget_count;       /* 1, or one for each sequence */
    uint32_t k_max;              /* pages a list that the client has room for */
    uint32_t scorer;             /* an id, for CXLKV_METHOD_SCORER; of a choose, the chooser's */
} request_select;
_Static_assert(sizeof(request_select) == 48, "no holes");

typedef struct request_attend {
    uint32_t layer;
    uint32_t q_heads;
    uint32_t dtype;              /* of the queries, and of the output */
    uint32_t per;                /* a list of pages for each row or each sequence */
    float scale;
    float softcap;
    uint32_t rows;               /* of all sequences */
    uint32_t lists;              /* 0: all pages; else as many as `per` says */
    uint32_t k;                  /* pages a list */
    uint32_t parts;              /* attend_parts() of the whole call, of which this may be a part */
    float error;
    uint32_t mass;               /* 1: what each page weighs is wanted, too; else 0 */
    uint32_t weight_tokens;      /* log-weights a page: 0, 1 or page_tokens */
    uint32_t virtual_rows;       /* of each list and kv head */
} request_attend;
_Static_assert(sizeof(request_attend) == 56, "no holes");

/* A choose has the form of a select with CXLKV_METHOD_SCORER, and no tails.
 *
 * After the arguments of a select or an attend come its sequences, each array up to a multiple of
 * 8. Then, of a select, the budgets (24 bytes each, cxlkv_budget), of an attend the pages (int32
 * [lists, kv_heads, k], -1: none), their log-weights (float32 [lists, kv_heads, k, weight_tokens])
 * and, where there are virtual rows, their keys [lists, kv_heads, virtual_rows, head_dim], values
 * likewise and log-counts [lists, kv_heads, virtual_rows], in float32. Then the queries [rows,
 * q_heads, head_dim], and of each sequence the keys of its open tail [keys_known to tokens %
 * page_tokens, kv_heads, head_dim], in the pool's dtype. An attend goes on with the values of the
 * tails, from values_known on, if values are not the keys' channels. The worker has those of the
 * tail's first tokens from earlier calls of this table and layer, in this page. */
typedef struct request_sequence {
    uint32_t table;
    uint32_t rows;
    uint64_t version;
    uint64_t tokens;
    uint32_t keys_known;
    uint32_t values_known;       /* 0 in a select, which needs none */
} request_sequence;
_Static_assert(sizeof(request_sequence) == 32, "no holes");
_Static_assert(sizeof(cxlkv_budget) == 24, "no holes");

/* Some bytes of a request that is longer than a slot, from an offset on; they follow. All its bytes
 * come so, in order; then the head alone in a request of its own. */
typedef struct request_part {
    uint64_t offset;
} request_part;

/* The next bytes of a result that was longer than an answer. */
typedef struct request_more {
    uint64_t result;
    uint64_t offset;
} request_more;

/* Every answer begins with it; then the text of an error, or the result from the offset on. */
typedef struct answer_head {
    int32_t code;                /* 0, or a negated error */
    uint32_t k;                  /* pages in the longest list, also when that is too many */
    uint64_t bytes;              /* of the whole result, or of the text */
    uint64_t result;             /* its number, for REQUEST_MORE */
} answer_head;
_Static_assert(sizeof(answer_head) == 24, "no holes");

/* Of a select. Then pages int32 [lists, kv_heads, k], scores float32 likewise, counts int32 [lists,
 * kv_heads]. */
typedef cxlkv_scored answer_select;
_Static_assert(sizeof(answer_select) == 48, "no holes");

/* Of a choose. Then pages int32 [lists, kv_heads, k], -1: none, and, in float32, log-weights
 * [lists, kv_heads, k, weight_tokens] and keys, values and log-counts of virtual rows, as an attend
 * has them. */
typedef struct answer_choose {
    uint64_t bytes_scored;
    uint64_t bytes_fetched;
    uint32_t lists;
    uint32_t weight_tokens;      /* 0: all log-weights are 0; else page_tokens */
    uint32_t virtual_rows;
    uint32_t reserved;
} answer_choose;
_Static_assert(sizeof(answer_choose) == 32, "no holes");

/* Then the log-sum-exp float32 [rows, q_heads], the output [rows, q_heads, value_head_dim] and, if
 * it is wanted, mass float32 [rows, kv_heads, k], k being that of the lists, or the pages of the
 * request's longest sequence. */
typedef struct answer_attend {
    uint64_t bytes_attended;
    uint32_t rows;
    uint32_t q_heads;
} answer_attend;
_Static_assert(sizeof(answer_attend) == 16, "no holes");

/* What a request is checked against: of layers of one shape. */
typedef struct request_facts {
    const cxlkv_layout *layout;
    uint32_t shapes;             /* 0: all layers have this one; else those of groups 0 and on are
                                  * this one and those behind it */
    uint32_t value_dim;          /* of values that are not in the keys; 0: they are */
    uint32_t page_count, part_count;
    /* In a pool with an encoding a sequence brings all of its tail, in the form of a page: */
    uint64_t key_pieces_bytes, value_pieces_bytes;
} request_facts;

/* A request that was checked; pointers into its bytes, at multiples of 8 from their start. */
typedef struct request {
    request_head head;
    const request_facts *facts;  /* of its layer */
    const request_table *tables; /* [head.count]: TABLES */
    const uint8_t *entries;
    uint64_t entry_count;
    const request_sequence *sequences; /* [head.count]: SELECT, CHOOSE and ATTEND */
    uint32_t layer;
    const uint8_t *queries, *keys, *values;
    uint64_t query_bytes;
    request_select select;
    request_attend attend;
    /* What of the two the core takes: all but starts, and room for results. */
    cxlkv_select_args selecting;
    cxlkv_attend_args attending;
    request_more more;
    request_part part;
    const uint8_t *part_bytes;
    uint64_t part_length;
} request;

/* 0, or -CXLKV_E_ARGUMENT and a text that names what is wrong. `bytes` lie at a multiple of 8, and
 * nothing in them is believed: all that `out` points to lies within them, pages are below
 * page_count, numbers are in range. What only the pool can tell (generations, versions, lengths of
 * tables) is not looked at. */
int request_parse(const uint8_t *bytes, uint64_t length, const request_facts *facts, request *out);
/* Of the tail's keys and values that a sequence brings, up to a multiple of 8. */
uint64_t request_key_bytes(const request_facts *facts, const request_sequence *item);
uint64_t request_value_bytes(const request_facts *facts, const request_sequence *item);
uint64_t request_query_bytes(const request_facts *facts, uint64_t rows, uint32_t q_heads,
                             uint32_t dtype);
