/* The caches of hosts and the buffers of actors: how stores reach memory, and what loads see. */
#include "simulation.h"

static uint64_t mask_bits(uint8_t mask) { /* 0x01 -> 0xff, 0x03 -> 0xffff, ... */
    uint64_t bits = 0;
    for (uint32_t byte = 0; byte < 8; byte++)
        if (mask >> byte & 1) bits |= (uint64_t)0xff << byte * 8;
    return bits;
}

static void merge(uint64_t *word, uint64_t value, uint8_t mask) {
    uint64_t bits = mask == 0xff ? ~(uint64_t)0 : mask_bits(mask);
    *word = (*word & ~bits) | (value & bits);
}

static uint32_t host_index(incoherent *sim, const struct host *host) {
    return (uint32_t)(host - sim->hosts);
}

static void memory_note(incoherent *sim, const char *what, const struct host *host, uint32_t word,
                        uint64_t value) {
    simulation_note(sim, what, -1, host_index(sim, host), word, FLUSH_NONE, value);
}

/* Before memory changes. */
static void keep_old(incoherent *sim, uint32_t line) {
    struct old_line *old = &sim->old[line];
    if (sim->version[line] && simulation_below(sim, 2)) return;
    old->until_step = sim->counts.steps;
    old->version = sim->version[line];
    memcpy(old->words, sim->memory + (size_t)line * LINE_WORDS, sizeof(old->words));
}

/* The whole line, as hardware does: what others wrote into it meanwhile is gone. */
static void write_back(incoherent *sim, struct host *host, struct cached *entry) {
    if (!entry->dirty) return;
    bool overwrites = entry->version != sim->version[entry->line];
    sim->counts.overwritten += overwrites;
    keep_old(sim, entry->line);
    memcpy(sim->memory + (size_t)entry->line * LINE_WORDS, entry->words, sizeof(entry->words));
    entry->version = host->seen[entry->line] = ++sim->version[entry->line];
    sim->counts.write_backs++;
    sim->counts.late_write_backs += !host->alive;
    memory_note(sim, overwrites ? "overwrites" : "write back", host, entry->line * LINE_WORDS,
                entry->dirty);
    entry->dirty = 0;
}

static void drop(incoherent *sim, struct host *host, uint32_t line) {
    int32_t at = host->where[line];
    host->dropped_step[line] = sim->counts.steps;
    if (at < 0) return;
    write_back(sim, host, &host->cached[at]);
    memory_note(sim, "gone", host, line * LINE_WORDS, 0);
    sim->counts.drops++;
    host->where[line] = -1;
    if ((uint32_t)at != --host->count) {
        host->cached[at] = host->cached[host->count];
        host->where[host->cached[at].line] = at;
    }
}

static struct cached *fill(incoherent *sim, struct host *host, uint32_t line) {
    if (host->where[line] >= 0) return &host->cached[host->where[line]];
    if (host->count == host->capacity) {
        sim->counts.evictions++;
        drop(sim, host, host->cached[simulation_below(sim, host->count)].line);
    }
    struct cached *entry = &host->cached[host->count];
    *entry = (struct cached){.line = line, .version = sim->version[line],
                             .filled_step = sim->counts.steps};
    memcpy(entry->words, sim->memory + (size_t)line * LINE_WORDS, sizeof(entry->words));
    host->where[line] = (int32_t)host->count++;
    host->seen[line] = sim->version[line];
    sim->counts.fills++;
    memory_note(sim, "fill", host, line * LINE_WORDS, entry->words[0]);
    return entry;
}

static void prefetch(incoherent *sim, struct host *host, uint32_t line) {
    sim->counts.prefetches += host->where[line] < 0;
    fill(sim, host, line);
}

/* Any line, or one that was in use not long ago. */
static uint32_t likely_line(incoherent *sim, const struct host *host) {
    uint32_t known = host->recent_count < RECENT_MAX ? host->recent_count : RECENT_MAX;
    if (known && simulation_below(sim, 2)) return host->recent[simulation_below(sim, known)];
    return simulation_below(sim, sim->options.lines);
}

static bool is_store(const struct item *item) {
    return item->kind == ITEM_STORE || item->kind == ITEM_RELEASE;
}

static bool is_write(const struct item *item) {
    return is_store(item) || item->kind == ITEM_STREAM;
}

/* Must the earlier item of an actor happen before the later one? */
static bool holds_back(incoherent *sim, const struct item *earlier, const struct item *later) {
    bool same_word = earlier->word == later->word;
    bool same_line = earlier->word / LINE_WORDS == later->word / LINE_WORDS;
    if (earlier->fence < later->fence && earlier->kind != ITEM_DROP_LEFT) return true;
    switch (later->kind) {
    case ITEM_STORE:
        if (sim->options.arm64) return is_store(earlier) && same_word;
        return is_store(earlier) || (earlier->kind == ITEM_STREAM && same_line);
    case ITEM_RELEASE:
        return is_write(earlier) && (is_store(earlier) || same_line);
    case ITEM_STREAM:
        return (is_store(earlier) && same_line) || (earlier->kind == ITEM_STREAM && same_word);
    default:
        return is_write(earlier) && same_line;
    }
}

/* The first item that item `index` has to wait for; -1 when there is none. */
static int blocker(incoherent *sim, const struct actor *actor, int index) {
    for (int i = 0; i < index; i++)
        if (holds_back(sim, &actor->items[i], &actor->items[index])) return i;
    return -1;
}

static void stream(incoherent *sim, struct actor *actor, const struct item *item) {
    struct host *host = &sim->hosts[actor->host];
    uint32_t line = item->word / LINE_WORDS;
    drop(sim, host, line);
    keep_old(sim, line);
    merge(&sim->memory[item->word], item->value, item->mask);
    host->seen[line] = ++sim->version[line];
    for (uint32_t i = 0; i < actor->item_count; i++)
        if (actor->items[i].kind == ITEM_STREAM && actor->items[i].word / LINE_WORDS == line) {
            sim->counts.partial_lines++;
            break;
        }
    memory_note(sim, "stream", host, item->word, item->value);
}

/* Only a fence orders a drop after older loads. So it may have happened before them, at any time
 * since the actor's last fence, and a prefetch filled the line again with what memory held then. */
static bool dropped_early(incoherent *sim, const struct actor *actor, uint32_t line) {
    struct host *host = &sim->hosts[actor->host];
    struct cached *entry = host->where[line] < 0 ? NULL : &host->cached[host->where[line]];
    const struct old_line *old = &sim->old[line];
    if (!sim->options.early_drops || sim->options.posted_fences || !host->alive) return false;
    if ((entry && entry->dirty) || simulation_below(sim, 2)) return false;
    if (!entry || entry->filled_step <= actor->fence_step) {
        if (old->until_step <= actor->fence_step || old->version < host->seen[line] ||
            old->until_step <= host->dropped_step[line])
            return false;
        entry = fill(sim, host, line);
        memcpy(entry->words, old->words, sizeof(entry->words));
        entry->version = host->seen[line] = old->version;
        entry->filled_step = old->until_step;
    }
    sim->counts.early_drops++;
    memory_note(sim, "early gone", host, line * LINE_WORDS, entry->words[0]);
    return true;
}

/* An item that nothing holds back happens, and leaves the buffer. */
static void take_effect(incoherent *sim, struct actor *actor, int index) {
    struct item item = actor->items[index];
    struct host *host = &sim->hosts[actor->host];
    uint32_t line = item.word / LINE_WORDS;
    for (int i = 0; i < index && is_store(&item); i++)
        if (is_write(&actor->items[i])) {
            sim->counts.reordered_stores++;
            break;
        }
    memmove(&actor->items[index], &actor->items[index + 1],
            (--actor->item_count - (uint32_t)index) * sizeof(item));
    switch (item.kind) {
    case ITEM_STORE:
    case ITEM_RELEASE: {
        struct cached *entry = fill(sim, host, line);
        merge(&entry->words[item.word % LINE_WORDS], item.value, item.mask);
        entry->dirty |= (uint8_t)(1 << item.word % LINE_WORDS);
        memory_note(sim, "cache", host, item.word, item.value);
        break;
    }
    case ITEM_STREAM:
        stream(sim, actor, &item);
        break;
    case ITEM_WRITE_BACK:
        if (host->where[line] >= 0) write_back(sim, host, &host->cached[host->where[line]]);
        break;
    default: /* a prefetcher likes lines that were just there */
        if (dropped_early(sim, actor, line)) break;
        drop(sim, host, line);
        if (host->alive && simulation_below(sim, 512) < sim->options.odds.fill)
            prefetch(sim, host, line);
    }
}

/* Something in the buffer that may happen does: any item, or the first of those that hold it. */
static void take_one(incoherent *sim, struct actor *actor) {
    int index = (int)simulation_below(sim, actor->item_count);
    for (int first; (first = blocker(sim, actor, index)) >= 0;) index = first;
    take_effect(sim, actor, index);
}

/* A burst: a few items in a row happen, or many stores, which are quicker than write-backs. */
static void take_some(incoherent *sim, struct actor *actor) {
    uint32_t count = 1 + simulation_below(sim, 3);
    if (simulation_below(sim, 2)) {
        while (actor->item_count && count--) take_one(sim, actor);
        return;
    }
    count = 1 + simulation_below(sim, ITEMS_MAX / 2);
    for (int i = 0; i < (int)actor->item_count && count; i++)
        if (is_store(&actor->items[i]) && blocker(sim, actor, i) < 0) {
            take_effect(sim, actor, i--);
            count--;
        }
}

/* The item happens, after those that it waits for. Returns how many left the buffer. */
static int force(incoherent *sim, struct actor *actor, int index) {
    int gone = 0;
    for (int first; (first = blocker(sim, actor, index - gone)) >= 0;)
        gone += force(sim, actor, first);
    take_effect(sim, actor, index - gone);
    return gone + 1;
}

void caches_issue(incoherent *sim, struct actor *actor, struct item item) {
    if (actor->item_count == ITEMS_MAX) take_one(sim, actor);
    item.fence = actor->fences;
    actor->items[actor->item_count++] = item;
    if (!is_write(&item)) return;
    for (uint32_t i = 0; i < actor->early_count; i++)
        if (actor->early[i].line == item.word / LINE_WORDS)
            actor->early[i--] = actor->early[--actor->early_count];
}

bool caches_hurry(incoherent *sim, struct actor *actor) {
    if (!actor->item_count || !simulation_below(sim, 8)) return false;
    take_some(sim, actor);
    return true;
}

void caches_settle(incoherent *sim, struct actor *actor) {
    uint32_t left = 0;
    while (left < actor->item_count) {
        struct item *item = &actor->items[left];
        if (item->kind == ITEM_DROP_LEFT || item->fence == actor->fences) {
            left++;
        } else if (item->kind == ITEM_DROP) {
            int32_t at = sim->hosts[actor->host].where[item->word / LINE_WORDS];
            if (at >= 0)
                write_back(sim, &sim->hosts[actor->host], &sim->hosts[actor->host].cached[at]);
            item->kind = ITEM_DROP_LEFT;
            left++;
        } else {
            force(sim, actor, (int)left);
        }
    }
    actor->fence_step = sim->counts.steps;
}

void caches_finish(incoherent *sim, struct actor *actor) {
    while (actor->item_count) take_effect(sim, actor, 0);
    caches_forget_early(actor);
    actor->fence_step = sim->counts.steps;
}

/* clflush: in order with stores and with fences, but not with non-temporal stores elsewhere. */
void caches_evict(incoherent *sim, struct actor *actor, uint32_t line) {
    caches_settle(sim, actor);
    for (int i = 0; i < (int)actor->item_count; i++)
        if (is_store(&actor->items[i]) ||
            (is_write(&actor->items[i]) && actor->items[i].word / LINE_WORDS == line))
            i -= force(sim, actor, i);
    drop(sim, &sim->hosts[actor->host], line);
}

void caches_forget_early(struct actor *actor) { actor->early_count = 0; }

/* The line as it was loaded ahead of its turn, or NULL. A load of the line as it is now makes an
 * older one useless: two loads of one word never go back in time. */
static const struct early *loaded_early(incoherent *sim, struct actor *actor, uint32_t line) {
    for (uint32_t i = 0; i < actor->early_count; i++) {
        if (actor->early[i].line != line) continue;
        if (simulation_below(sim, 2)) return &actor->early[i];
        actor->early[i] = actor->early[--actor->early_count];
        return NULL;
    }
    return NULL;
}

uint64_t caches_load(incoherent *sim, struct actor *actor, uint32_t word) {
    uint32_t line = word / LINE_WORDS;
    struct host *host = &sim->hosts[actor->host];
    if (!host->recent_count || host->recent[(host->recent_count - 1) % RECENT_MAX] != line)
        host->recent[host->recent_count++ % RECENT_MAX] = line;
    const struct early *early = loaded_early(sim, actor, line);
    uint64_t value;
    if (early) {
        value = early->words[word % LINE_WORDS];
        sim->counts.early_loads++;
    } else {
        struct cached *entry = fill(sim, host, line);
        value = entry->words[word % LINE_WORDS];
        sim->counts.stale_loads += entry->version != sim->version[line];
    }
    for (uint32_t i = 0; i < actor->item_count; i++)
        if (actor->items[i].word == word && is_write(&actor->items[i]))
            merge(&value, actor->items[i].value, actor->items[i].mask);
    return value;
}

static void load_ahead(incoherent *sim) {
    struct actor *actor = sim->actors[simulation_below(sim, sim->actor_count)];
    uint32_t line = likely_line(sim, &sim->hosts[actor->host]);
    if (actor->state != ACTOR_READY || actor->early_count == EARLY_MAX) return;
    for (uint32_t i = 0; i < actor->item_count; i++)
        if (is_write(&actor->items[i]) && actor->items[i].word / LINE_WORDS == line) return;
    for (uint32_t i = 0; i < actor->early_count; i++)
        if (actor->early[i].line == line) return;
    struct early *early = &actor->early[actor->early_count++];
    early->line = line;
    memcpy(early->words, fill(sim, &sim->hosts[actor->host], line)->words, sizeof(early->words));
    memory_note(sim, "load ahead", &sim->hosts[actor->host], line * LINE_WORDS, early->words[0]);
}

void caches_events(incoherent *sim) {
    const struct incoherent_odds *odds = &sim->options.odds;
    uint64_t draw = simulation_random(sim);
    if ((draw & 4095) < odds->drain)
        take_some(sim, sim->actors[simulation_below(sim, sim->actor_count)]);
    if ((draw >> 12 & 4095) < odds->evict) {
        struct host *host = &sim->hosts[simulation_below(sim, sim->options.hosts)];
        if (host->count) {
            sim->counts.evictions++;
            drop(sim, host, host->cached[simulation_below(sim, host->count)].line);
        }
    }
    if ((draw >> 24 & 4095) < odds->fill) {
        struct host *host = &sim->hosts[simulation_below(sim, sim->options.hosts)];
        if (host->alive) prefetch(sim, host, likely_line(sim, host));
    }
    if (sim->options.arm64 && (draw >> 36 & 4095) < odds->early) load_ahead(sim);
}

void caches_lose(incoherent *sim, struct actor *actor) {
    uint32_t happen = simulation_below(sim, actor->item_count + 1);
    while (happen--) take_one(sim, actor);
    for (uint32_t i = 0; i < actor->item_count; i++)
        sim->counts.lost_stores += is_write(&actor->items[i]);
    actor->item_count = 0;
}

void caches_lose_host(incoherent *sim, struct host *host) {
    for (uint32_t i = 0; i < host->count; i++) {
        sim->counts.lost_lines += host->cached[i].dirty != 0;
        host->where[host->cached[i].line] = -1;
    }
    host->count = 0;
}

void caches_restart_host(incoherent *sim, struct host *host) {
    for (uint32_t i = 0; i < sim->actor_count; i++)
        if (&sim->hosts[sim->actors[i]->host] == host) caches_lose(sim, sim->actors[i]);
    for (uint32_t i = 0; i < host->count; i++)
        if (simulation_below(sim, 2)) write_back(sim, host, &host->cached[i]);
    caches_lose_host(sim, host);
    host->alive = true;
}

void caches_drain(incoherent *sim) {
    for (uint32_t i = 0; i < sim->actor_count; i++) caches_finish(sim, sim->actors[i]);
    for (uint32_t h = 0; h < sim->options.hosts; h++)
        while (sim->hosts[h].count) drop(sim, &sim->hosts[h], sim->hosts[h].cached[0].line);
}

void caches_make(incoherent *sim) {
    uint32_t lines = sim->options.lines;
    sim->memory = calloc(lines, FLUSH_LINE_BYTES);
    sim->version = calloc(lines, sizeof(*sim->version));
    sim->old = calloc(lines, sizeof(*sim->old));
    if (!sim->memory || !sim->version || !sim->old) simulation_die(sim, "no memory");
    for (uint32_t h = 0; h < sim->options.hosts; h++) {
        struct host *host = &sim->hosts[h];
        host->alive = true;
        host->capacity = 1 + simulation_below(sim, sim->options.cache_lines_max);
        if (host->capacity > lines) host->capacity = lines;
        host->where = malloc(lines * sizeof(*host->where));
        host->cached = malloc(host->capacity * sizeof(*host->cached));
        host->seen = calloc(lines, sizeof(*host->seen));
        host->dropped_step = calloc(lines, sizeof(*host->dropped_step));
        if (!host->where || !host->cached || !host->seen || !host->dropped_step)
            simulation_die(sim, "no memory");
        for (uint32_t line = 0; line < lines; line++) host->where[line] = -1;
    }
}

void caches_free(incoherent *sim) {
    for (uint32_t h = 0; h < sim->options.hosts; h++) {
        free(sim->hosts[h].where);
        free(sim->hosts[h].cached);
        free(sim->hosts[h].seen);
        free(sim->hosts[h].dropped_step);
    }
    free(sim->memory);
    free(sim->version);
    free(sim->old);
}
