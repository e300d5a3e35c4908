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
    [FLUSH_NAME_FENCE] = "name_fence",
    [FLUSH_BEAT] = "beat",
    [FLUSH_BEAT_FENCE] = "beat_fence",
    [FLUSH_CLOSE] = "close",
    [FLUSH_CLOSE_FENCE] = "close_fence",
    [FLUSH_CUT] = "cut",
    [FLUSH_CUT_FENCE] = "cut_fence",
    [FLUSH_SLOT] = "slot",
    [FLUSH_SLOT_FENCE] = "slot_fence",
    [FLUSH_CLAIM] = "claim",
    [FLUSH_CLAIM_FENCE] = "claim_fence",
    [FLUSH_COMMIT] = "commit",
    [FLUSH_COMMIT_FENCE] = "commit_fence",
    [FLUSH_LOG] = "log",
    [FLUSH_LOG_FENCE] = "log_fence",
    [FLUSH_GIVE] = "give",
    [FLUSH_GIVE_FENCE] = "give_fence",
    [FLUSH_TAKE] = "take",
    [FLUSH_TAKE_FENCE] = "take_fence",
    [FLUSH_NAME_LOOK_BEGIN] = "name_look_begin",
    [FLUSH_NAME_LOOK] = "name_look",
    [FLUSH_NAME_LOOK_FENCE] = "name_look_fence",
    [FLUSH_BEAT_LOOK_BEGIN] = "beat_look_begin",
    [FLUSH_BEAT_LOOK] = "beat_look",
    [FLUSH_BEAT_LOOK_FENCE] = "beat_look_fence",
    [FLUSH_FENCE_LOOK_BEGIN] = "fence_look_begin",
    [FLUSH_FENCE_LOOK] = "fence_look",
    [FLUSH_FENCE_LOOK_FENCE] = "fence_look_fence",
    [FLUSH_SLOT_LOOK_BEGIN] = "slot_look_begin",
    [FLUSH_SLOT_LOOK] = "slot_look",
    [FLUSH_SLOT_LOOK_FENCE] = "slot_look_fence",
    [FLUSH_COMMIT_LOOK_BEGIN] = "commit_look_begin",
    [FLUSH_COMMIT_LOOK] = "commit_look",
    [FLUSH_COMMIT_LOOK_FENCE] = "commit_look_fence",
    [FLUSH_CLAIM_LOOK_BEGIN] = "claim_look_begin",
    [FLUSH_CLAIM_LOOK] = "claim_look",
    [FLUSH_CLAIM_LOOK_FENCE] = "claim_look_fence",
    [FLUSH_LOG_LOOK_BEGIN] = "log_look_begin",
    [FLUSH_LOG_LOOK] = "log_look",
    [FLUSH_LOG_LOOK_FENCE] = "log_look_fence",
    [FLUSH_RPC_PAYLOAD_SENT] = "rpc_payload_sent",
    [FLUSH_RPC_PAYLOAD_SENT_FENCE] = "rpc_payload_sent_fence",
    [FLUSH_RPC_HEADER_SENT] = "rpc_header_sent",
    [FLUSH_RPC_HEADER_SENT_FENCE] = "rpc_header_sent_fence",
    [FLUSH_RPC_LOOK_BEGIN_FENCE] = "rpc_look_begin_fence",
    [FLUSH_RPC_LOOK] = "rpc_look",
    [FLUSH_RPC_LOOK_FENCE] = "rpc_look_fence",
    [FLUSH_RPC_SEEN_FENCE] = "rpc_seen_fence",
    [FLUSH_RPC_PAYLOAD] = "rpc_payload",
    [FLUSH_RPC_PAYLOAD_FENCE] = "rpc_payload_fence",
    [FLUSH_RPC_ATTACH] = "rpc_attach",
    [FLUSH_RPC_ATTACH_FENCE] = "rpc_attach_fence",
    [FLUSH_LOCAL] = "local",
};

void simulation_note(incoherent *sim, const char *what, int actor, uint32_t host, uint32_t word,
                     enum flush_site site, uint64_t value) {
    sim->trace[sim->trace_count++ % sim->trace_events] = (struct event){
        sim->counts.steps, value, what, actor, host, word, (uint32_t)site};
    uint64_t hash = sim->trace_hash ^ value ^ (uint64_t)word << 32 ^ (uint64_t)host << 16;
    hash ^= (uint64_t)site << 8 ^ (uint64_t)(uint8_t)what[0] << 24 ^ (uint64_t)(uint8_t)actor << 48;
    hash = (hash + sim->counts.steps) * 0x9e3779b97f4a7c15;
    sim->trace_hash = hash ^ hash >> 29;
}

void incoherent_trace(incoherent *sim, FILE *to) {
    uint64_t events = sim->trace_events, count = sim->trace_count;
    uint64_t first = count > events ? count - events : 0;
    fprintf(to, "seed %" PRIu64 ", %s, left out: %s; the last %" PRIu64 " of %" PRIu64 ":\n",
            sim->options.seed, sim->options.arm64 ? "arm64" : "x86",
            site_names[sim->options.left_out] ? site_names[sim->options.left_out] : "nothing",
            count - first, count);
    for (uint64_t i = first; i < count; i++) {
        const struct event *event = &sim->trace[i % events];
        fprintf(to, "%8" PRIu64 " host %u ", event->step, event->host);
        if (event->actor >= 0) fprintf(to, "actor %-2d ", event->actor);
        else fprintf(to, "memory   ");
        fprintf(to, "%-12s", event->what);
        if (event->word != NO_WORD)
            fprintf(to, " line %u.%u = %#" PRIx64, event->word / LINE_WORDS,
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
