/* Goal: a loop on registers multiplies as often as it says, by each instruction set that this CPU
 * has: a product is one, and its sum is counted. */
#include "check.h"
#include "measure/measure.h"

enum { INSTRUCTIONS = 12 * 1024 }; /* of one turn of a loop */

static int run(const char *kernels, uint32_t kind, uint64_t nanoseconds,
               cxlkv_arithmetic *found) {
    int code = cxlkv_arithmetic_run(kernels, kind, nanoseconds, found);
    CHECK(code < 0 || found->elapsed_ns >= nanoseconds);
    return code;
}

/* A product for each lane, two where bf16 comes in pairs, one for two bytes of codes: 0 where the
 * CPU has no such table. */
static uint64_t products_of(const char *kernels, uint32_t kind) {
    cxlkv_arithmetic once, longer;
    if (kernels_force(kernels) != 0) return 0;
    CHECK(run(kernels, kind, 0, &once) == 0);
    /* An emulator takes a millisecond for one turn, a CPU microseconds: a thread that has to wait
     * in its first one has no second, and is asked for more. */
    uint64_t least_ns = 10 * once.elapsed_ns;
    do {
        CHECK(run(kernels, kind, least_ns, &longer) == 0);
        least_ns *= 2;
    } while (longer.products == once.products && least_ns < 10000000000u);
    CHECK(once.products % INSTRUCTIONS == 0 && longer.products > once.products);
    CHECK(longer.products % once.products == 0);
    return once.products / INSTRUCTIONS;
}

static void test_every_table(void) {
    static const struct {
        const char *kernels;
        uint32_t fp32, bf16, codes;
    } wanted[] = {{"serial", 4, 4, 4},   {"avx2", 8, 8, 16},         {"avx512", 16, 16, 16},
                  {"avx512_bf16", 16, 32, 32}, {"amx", 16, 32, 32}, {"neon", 4, 4, 4},
                  {"neon_bf16", 4, 4, 4}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        uint64_t fp32 = products_of(wanted[i].kernels, CXLKV_ARITHMETIC_FP32);
        CHECK(fp32 == 0 || fp32 == wanted[i].fp32);
        uint64_t bf16 = products_of(wanted[i].kernels, CXLKV_ARITHMETIC_BF16);
        CHECK(bf16 == 0 || bf16 == wanted[i].bf16);
        uint64_t codes = products_of(wanted[i].kernels, CXLKV_ARITHMETIC_CODES);
        CHECK(codes == 0 || codes == wanted[i].codes);
    }
    CHECK(products_of("serial", CXLKV_ARITHMETIC_FP32) == 4);
}

static void test_nonsense(void) {
    cxlkv_arithmetic found;
    CHECK(run("sse9", CXLKV_ARITHMETIC_FP32, 0, &found) == -CXLKV_E_ARGUMENT);
    CHECK(strstr(cxlkv_error_text(), "sse9"));
    CHECK(run("serial", 3, 0, &found) == -CXLKV_E_ARGUMENT);
}

int main(void) {
    test_every_table();
    test_nonsense();
    return 0;
}
