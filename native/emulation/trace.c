/* The record of what happened: a ring of the last operations and events, and a hash over all. */
#include <inttypes.h>

#include "simulation.h"

static const char *const site_names[FLUSH_SITES] = {
    [FLUSH_PUBLISH_HEADER] = "publish_header",
    [FLUSH_PUBLISH_PAYLOAD_FENCE] = "publish_payload_fence",
    [FLUSH_PUBLISH_DESCRIPTOR] = "publish_descriptor",
    [FLUSH_PUBLISH_FENCE] = "publish_fence",
    [FLUSH_ACQUIRE_BEGIN_FENCE] = "acquire_begin_fence",
    [FLUSH_ACQUIRE_DESCRIPTOR] = "acquire_descriptor",
    [FLUSH_ACQUIRE_DESCRIPTOR_FENCE] = "acquire_descriptor_fence",
    [FLUSH_ACQUIRE_SEEN_FENCE] = "acquire_seen_fence",
    [FLUSH_ACQUIRE_PAYLOAD] = "acquire_payload",
    [FLUSH_ACQUIRE_PAYLOAD_FENCE] = "acquire_payload_fence",
    [FLUSH_ACQUIRE_COPIED_FENCE] = "acquire_copied_fence",
    [FLUSH_ACQUIRE_RECHECK] = "acquire_recheck",
    [FLUSH_ACQUIRE_RECHECK_FENCE] = "acquire_recheck_fence",
    [FLUSH_FREE_DESCRIPTOR] = "free_descriptor",
    [FLUSH_FREE_FENCE] = "free_fence",
    [FLUSH_PIN] = "pin",
    [FLUSH_PIN_FENCE] = "pin_fence",
    [FLUSH_UNPIN_BEGIN_FENCE] = "unpin_begin_fence",
    [FLUSH_UNPIN] = "unpin",
    [FLUSH_UNPIN_FENCE] = "unpin_fence",
    [FLUSH_OWNER_LOOK_BEGIN_FENCE] = "owner_look_begin_fence",
    [FLUSH_OWNER_LOOK] = "owner_look",
    [FLUSH_OWNER_LOOK_FENCE] = "owner_look_fence",
    [FLUSH_NAME] = "name",
    [FLUSH_NAME_FENCE] = "name fence",
    [FLUSH_BEAT] = "beat",
    [FLUSH_BEAT_FENCE] = "beat fence",
    [FLUSH_CLOSE] = "close",
    [FLUSH_CLOSE_FENCE] = "close fence",
    [FLUSH_CUT] = "cut",
    [FLUSH_CUT_FENCE] = "cut fence",
    [FLUSH_SLOT] = "slot",
    [FLUSH_SLOT_FENCE] = "slot fence",
    [FLUSH_CLAIM] = "claim",
    [FLUSH_CLAIM_FENCE] = "claim fence",
    [FLUSH_COMMIT] = "commit",
    [FLUSH_COMMIT_FENCE] = "commit fence",
    [FLUSH_LOG] = "log",
    [FLUSH_LOG_FENCE] = "log fence",
    [FLUSH_GIVE] = "give",
    [FLUSH_GIVE_FENCE] = "give fence",
    [FLUSH_TAKE] = "take",
    [FLUSH_TAKE_FENCE] = "take fence",
    [FLUSH_NAME_LOOK_BEGIN] = "name look begin",
    [FLUSH_NAME_LOOK] = "name look",
    [FLUSH_NAME_LOOK_FENCE] = "name look fence",
    [FLUSH_BEAT_LOOK_BEGIN] = "beat look begin",
    [FLUSH_BEAT_LOOK] = "beat look",
    [FLUSH_BEAT_LOOK_FENCE] = "beat look fence",
    [FLUSH_FENCE_LOOK_BEGIN] = "fence look begin",
    [FLUSH_FENCE_LOOK] = "fence look",
    [FLUSH_FENCE_LOOK_FENCE] = "fence look fence",
    [FLUSH_SLOT_LOOK_BEGIN] = "slot look begin",
    [FLUSH_SLOT_LOOK] = "slot look",
    [FLUSH_SLOT_LOOK_FENCE] = "slot look fence",
    [FLUSH_COMMIT_LOOK_BEGIN] = "commit look begin",
    [FLUSH_COMMIT_LOOK] = "commit look",
    [FLUSH_COMMIT_LOOK_FENCE] = "commit look fence",
    [FLUSH_CLAIM_LOOK_BEGIN] = "claim look begin",
    [FLUSH_CLAIM_LOOK] = "claim look",
    [FLUSH_CLAIM_LOOK_FENCE] = "claim look fence",
    [FLUSH_LOG_LOOK_BEGIN] = "log look begin",
    [FLUSH_LOG_LOOK] = "log look",
    [FLUSH_LOG_LOOK_FENCE] = "log look fence",
    [FLUSH_LOCAL] = "local",
};

void simulation_note(incoherent *sim, const char *what, int actor, uint32_t host, uint32_t word,
                     enum flush_site site, uint64_t value) {
    sim->trace[sim->trace_count++ % TRACE_MAX] = (struct event){
        sim->counts.steps, value, what, actor, host, word, (uint32_t)site};
    uint64_t hash = sim->trace_hash ^ value ^ (uint64_t)word << 32 ^ (uint64_t)host << 16;
    hash ^= (uint64_t)site << 8 ^ (uint64_t)(uint8_t)what[0] << 24 ^ (uint64_t)(uint8_t)actor << 48;
    hash = (hash + sim->counts.steps) * 0x9e3779b97f4a7c15;
    sim->trace_hash = hash ^ hash >> 29;
}

void incoherent_trace(incoherent *sim, FILE *to) {
    uint64_t first = sim->trace_count > TRACE_MAX ? sim->trace_count - TRACE_MAX : 0;
    fprintf(to, "seed %" PRIu64 ", %s, left out: %s; the last %" PRIu64 " of %" PRIu64 ":\n",
            sim->options.seed, sim->options.arm64 ? "arm64" : "x86",
            site_names[sim->options.left_out] ? site_names[sim->options.left_out] : "nothing",
            sim->trace_count - first, sim->trace_count);
    for (uint64_t i = first; i < sim->trace_count; i++) {
        const struct event *event = &sim->trace[i % TRACE_MAX];
        fprintf(to, "%8" PRIu64 " host %u ", event->step, event->host);
        if (event->actor >= 0) fprintf(to, "actor %-2d ", event->actor);
        else fprintf(to, "memory   ");
        fprintf(to, "%-12s line %u.%u = %#" PRIx64, event->what, event->word / LINE_WORDS,
                event->word % LINE_WORDS, event->value);
        if (event->site) {
            const char *name = site_names[event->site];
            fprintf(to, " at %s", name ? name : "a site without a name");
        }
        fputc('\n', to);
    }
}

void simulation_die(incoherent *sim, const char *why) {
    incoherent_trace(sim, stderr);
    fprintf(stderr, "incoherent memory: %s\n", why);
    abort();
}
