/* Logs, ours and the others': what hosts tell each other about what can be found where. */
#include "base/guard.h"
#include "coherence/host_log.h"
#include "format/mapping.h"
#include "format/poison.h"
#include "format/records.h"
#include "host/rebuild.h"
#include "pages/log_writer.h"
#include "pages/published.h"
#include "sharing/log_reader.h"

/* By the page's descriptor, from memory. */
static bool says_so(cxlkv_pool *pool, const log_record *record) {
    descriptor line;
    descriptor_drop(pool, record->page);
    return descriptor_read(pool, record->page, &line) == 0 &&
           line.version == (record->generation << 8 | PAGE_PUBLISHED) &&
           memcmp(line.hash, record->hash, sizeof(line.hash)) == 0;
}

/* What cannot be read is not so. */
static bool is_so_now(cxlkv_pool *pool, const log_record *record) {
    return GUARDED(says_so(pool, record), poison_error_locked(pool, &fault) == 0);
}

/* Pages and texts change hands: another log may say what came before this record, or after it. */
static void learn(cxlkv_pool *pool, const log_record *record) {
    page_info *info = &pool->pages[record->page];
    uint32_t other = index_find(pool, record->hash);
    if (info->holders && info->generation != record->generation) return; /* pinned: older news */
    if (other != NO_PAGE && page_is_ours(pool, other)) return;
    bool in_turn = other == NO_PAGE && !info->published && info->generation <= record->generation;
    if (!in_turn && !is_so_now(pool, record)) return;
    if (other != NO_PAGE) {
        index_erase(pool, record->hash);
        page_unpublish(pool, other);
    }
    if (info->published) index_erase_page(pool, record->page);
    page_unpublish(pool, record->page);
    if (!index_insert(pool, record->hash, record->page)) return;
    info->generation = record->generation;
    info->published = 1;
    pool->host->published_pages++;
}

/* Two hosts may publish the same hash at the same time, before either reads the other's log. Every
 * publication reads the logs first, so our copy is not newer than the record that we read now. */
static void forget_own_copy(cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page != NO_PAGE && page_is_ours(pool, page)) page_forget(pool, hash, false);
}

static void apply(cxlkv_pool *pool, const log_record *record) {
    uint32_t page = record->page;
    page_info *info = &pool->pages[page];
    if (record->operation == LOG_FORGET) {
        if (!page_is_ours(pool, page)) forgotten_add(pool, record);
        else if (info->published && forget_matters(pool, record))
            page_forget(pool, record->hash, true);
        return;
    }
    if (record->operation == LOG_FREE && record->publication) forget_own_copy(pool, record->hash);
    if (page_is_ours(pool, page) || info->retired) return; /* we know better */
    bool known = index_find(pool, record->hash) == page;
    if (record->operation == LOG_PUBLISH && !known) learn(pool, record);
    if (record->operation == LOG_FREE && known && info->generation <= record->generation) {
        index_erase(pool, record->hash);
        page_unpublish(pool, page);
    }
}

/* Reads one host's log to its end; false when it cannot be followed any more. */
static bool follow(cxlkv_pool *pool, uint32_t host) {
    log_record records[LOG_BATCH];
    host_view *view = &pool->host->views[host];
    int count;
    while ((count = hosts_read_log(&pool->hosts, host, &view->log, records)) > 0)
        for (int i = 0; i < count; i++) apply(pool, &records[i]);
    return count == 0;
}

/* All of them; false when one cannot be followed any more. */
static bool follow_all(cxlkv_pool *pool) {
    const log_place *places[HOSTS_MAX];
    bool followed = true;
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        places[host] = &pool->host->views[host].log;
    uint64_t moved = hosts_logs_moved(&pool->hosts, places);
    for (uint32_t host = 0; host < pool->sharing.hosts; host++) {
        if (host == pool->hosts.self || !(moved >> host & 1) || follow(pool, host)) continue;
        hosts_skip_log(&pool->hosts, host, &pool->host->views[host].log);
        followed = false;
    }
    return followed;
}

/* What others wish to be forgotten of pages that are not ours, and not theirs: their owner may not
 * run. Each comes after the publishing that it means, which another log told: so that is read. */
static void forget_foreign(cxlkv_pool *pool) {
    for (uint32_t i = 0; i < pool->forgotten.count; i++) {
        const log_record *record = &pool->forgotten.records[i];
        if (page_is_ours(pool, record->page) || index_find(pool, record->hash) != record->page ||
            !forget_matters(pool, record))
            continue;
        index_erase(pool, record->hash);
        page_unpublish(pool, record->page);
    }
}

void peers_follow(cxlkv_pool *pool) {
    bool followed = follow_all(pool);
    if (pool->forgotten.count) {
        followed = follow_all(pool) && followed;
        forget_foreign(pool);
        forgotten_drop(pool);
    }
    if (followed) return;
    /* It wrote faster than we read, or a record is damaged: the descriptors say the same. */
    host_count(pool->host, COUNT_LOG_RESCANS);
    descriptors_hand_over(pool, false);
    host_rebuild(pool);
}
