/* Goal: who upgrades a pool on memory that hosts share may lose its machine at any step: memory has
 * a whole superblock of one version then. Method: on emulated memory a host upgrades the page of a
 * superblock and dies at each of its steps in turn: its process, or all of it, with its caches lost
 * or written back later; what memory has is read. 25 seeds for each step, or what knobs.h says. */
#include "base/crc32c.h"
#include "check.h"
#include "format/superblock.h"
#include "knobs.h"

static struct scene {
    incoherent *sim;
    int actor;
    int loss;                    /* of the host that dies; -1: its process only */
    uint64_t dies_step, steps;
} scene;

static uint64_t runs, upgraded;

static void upgrade_run(void *base) { superblock_upgrade(base); }

static void dies(void *context) {
    (void)context;
    if (incoherent_running(scene.sim) != scene.actor || ++scene.steps != scene.dies_step) return;
    if (scene.loss < 0) incoherent_kill(scene.sim, scene.actor);
    else incoherent_kill_host(scene.sim, 0, (enum incoherent_loss)scene.loss);
}

/* As the version before wrote it. */
static void make_page(uint8_t page[SUPERBLOCK_BYTES]) {
    cxlkv_pool pool = {.region = {.base = page}, .layout = test_layout(),
                       .sharing = {.kind = CXLKV_SHARING_HOST, .hosts = 1}};
    superblock *block = (superblock *)page;
    CHECK(geometry_make(&pool.layout, &pool.sharing, 8 << 20, &pool.geometry) == 0);
    superblock_write(&pool);
    block->version = FORMAT_BEFORE;
    memset(&block->crc_before, 0, sizeof(*block) - offsetof(superblock, crc_before));
    block->crc_before = crc32c(0, block, offsetof(superblock, crc_before));
}

/* Which version memory has; 0: none that is whole. */
static uint32_t version_in(const uint8_t *base) {
    uint8_t page[SUPERBLOCK_BYTES];
    pool_facts facts;
    incoherent_peek(scene.sim, base, sizeof(page), page);
    int code = superblock_read(SUPERBLOCK_UPGRADE, page, UINT64_MAX, "memory", &facts);
    return code < 0 ? 0 : ((superblock *)page)->version;
}

static bool run(uint64_t seed, bool arm64, uint64_t dies_step, uint64_t *steps) {
    static uint8_t page[SUPERBLOCK_BYTES];
    struct incoherent_options options = incoherent_usual(seed);
    options.lines = SUPERBLOCK_BYTES / LINE_BYTES;
    options.arm64 = arm64;
    knob_options(&options);
    scene = (struct scene){.sim = incoherent_make(&options), .dies_step = dies_step,
                           .loss = (int)(seed % 3) - 1};
    uint8_t *base = incoherent_base(scene.sim);
    make_page(page);
    for (size_t at = 0; at < sizeof(page); at += LINE_BYTES)
        flush_store_line(base + at, page + at, 0);
    CHECK(version_in(base) == FORMAT_BEFORE);
    incoherent_hook(scene.sim, dies, NULL);
    scene.actor = incoherent_actor(scene.sim, 0, upgrade_run, base);
    incoherent_run(scene.sim);
    uint32_t version = version_in(base);
    if (scene.loss == INCOHERENT_DELAY) incoherent_drain(scene.sim);
    bool right = version != 0 && version_in(base) != 0;
    if (scene.steps < dies_step) right = right && version == FORMAT_VERSION;
    upgraded += version == FORMAT_VERSION;
    *steps = scene.steps;
    if (!right) {
        incoherent_trace(scene.sim, stderr);
        fprintf(stderr, "dies at step %lu: version %u\n", dies_step, version);
    }
    incoherent_free(scene.sim);
    return right;
}

static bool run_all(uint64_t seed, bool arm64) { return knob_each_step(run, seed, arm64, &runs); }

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 25);
    CHECK(knob_all_seeds(seeds, run_all));
    CHECK(upgraded > 0 && upgraded < runs);
    fprintf(stderr, "%lu seeds, %lu runs, %lu upgraded\n", seeds, runs, upgraded);
    return 0;
}
