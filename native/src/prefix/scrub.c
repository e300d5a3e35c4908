/* Published pages whose bytes are not to outlive them: forgotten, and overwritten with zeros when
 * the last who holds one lets go. The mark is in the host state, as that of a pin. */
#include <string.h>

#include "base/flush.h"
#include "pool/peers.h"
#include "prefix/prefix.h"

/* Layers of other parts lie in the same rows: each row once. */
static bool is_first_of_row(const cxlkv_pool *pool, uint32_t layer) {
    for (uint32_t before = 0; before < layer; before++)
        if (pool->row_of[before] == pool->row_of[layer]) return false;
    return true;
}

static void wipe(cxlkv_pool *pool, uint32_t page) {
    record_header_wipe(pool, page);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        if (!is_first_of_row(pool, layer)) continue;
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
            uint8_t *pieces = pieces_of(pool, page, layer, kind);
            uint64_t bytes = pool->layout.kv_heads * piece_stride(&pool->geometry, kind);
            memset(pieces, 0, bytes);
            if (pool->mode != VISIBILITY_COHERENT)
                flush_write_back(FLUSH_PUBLISH_HEADER, pieces, bytes);
        }
    }
}

bool page_scrubbed(cxlkv_pool *pool, uint32_t page) {
    page_info *info = &pool->pages[page];
    if (!info->scrub) return true;
    guard fault;
    GUARD_BEGIN(fault) {
        wipe(pool, page);
    } GUARD_END(fault, page_retire(pool, page))
    if (info->retired) return false; /* what could not be written keeps its mark */
    info->scrub = 0; /* last: who dies before has it done by who repairs the host's state */
    return true;
}

static void scrub_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context) {
    cxlkv_scrubbed *scrubbed = context;
    if (!page_is_ours(pool, page)) {
        scrubbed->elsewhere++;
        return;
    }
    pool->pages[page].scrub = 1;
    page_forget(pool, hash, true);
    if (pool->pages[page].scrub) scrubbed->held++;
    else scrubbed->pages++;
}

int cxlkv_scrub(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                cxlkv_scrubbed *scrubbed) {
    *scrubbed = (cxlkv_scrubbed){0};
    return keys_call(pool, count, hashes, true, scrub_one, scrubbed);
}
