/* What `cxlkv bench decode` holds the score and accumulate kernels against: the instructions that
 * they multiply with, on registers alone. Each product is of ones, so that the sum of the lanes
 * tells how many there were; a loop ends before fp32 would round that. */
#include "base/cpu.h"
#include "measure/measure.h"

/* Twelve sums hide the latency of every CPU that we know. STEPS additions of two are well
 * below 2^24, as are the sums of all lanes' pairs. */
enum { SUMS = 12, STEPS = 1 << 10 };

/* `one` is not known to the compiler: with a constant it would foretell the sums. Returns the sum
 * of all lanes after STEPS instructions for each of the SUMS. */
typedef double sum_loop(float one);

typedef float four_lanes __attribute__((vector_size(16)));

#define UNROLL _Pragma("GCC unroll 16")
/* Emits nothing: the compiler no longer knows what is in there, nor that two of them are alike. */
#if defined(__x86_64__)
#define OPAQUE(vector) __asm__("" : "+x"(vector))
#else
#define OPAQUE(vector) __asm__("" : "+w"(vector))
#endif

/* What every CPU has: a product, and an addition, or both in one on arm64. */
static double fma_any(float one) {
    four_lanes factor = {one, one, one, one}, sums[SUMS] = {{0}};
    for (int i = 0; i < SUMS; i++) OPAQUE(sums[i]);
    for (int step = 0; step < STEPS; step++) {
#if defined(__aarch64__)
        UNROLL for (int i = 0; i < SUMS; i++)
            __asm__("fmla %0.4s, %1.4s, %1.4s" : "+w"(sums[i]) : "w"(factor));
#else
        UNROLL for (int i = 0; i < SUMS; i++) {
            OPAQUE(factor); /* so that each product is made anew */
            sums[i] += factor * factor;
        }
#endif
    }
    double sum = 0;
    for (int i = 0; i < SUMS; i++) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    return sum;
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) static double fma_avx2(float one) {
    float lanes[8];
    __m256 factor = _mm256_set1_ps(one), sums[SUMS];
    for (int i = 0; i < SUMS; i++) {
        sums[i] = _mm256_setzero_ps();
        OPAQUE(sums[i]);
    }
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++) sums[i] = _mm256_fmadd_ps(factor, factor, sums[i]);
    double sum = 0;
    for (int i = 0; i < SUMS; i++) {
        _mm256_storeu_ps(lanes, sums[i]);
        for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
    }
    return sum;
}

__attribute__((target("avx512f"))) static double sum_of_lanes(const __m512 *sums) {
    double sum = 0;
    for (int i = 0; i < SUMS; i++) sum += _mm512_reduce_add_ps(sums[i]);
    return sum;
}

__attribute__((target("avx512f"))) static double fma_avx512(float one) {
    __m512 factor = _mm512_set1_ps(one), sums[SUMS];
    for (int i = 0; i < SUMS; i++) {
        sums[i] = _mm512_setzero_ps();
        OPAQUE(sums[i]);
    }
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++) sums[i] = _mm512_fmadd_ps(factor, factor, sums[i]);
    return sum_of_lanes(sums);
}

__attribute__((target("avx512f,avx512bf16"))) static double bf16_avx512(float one) {
    __m512 ones = _mm512_set1_ps(one), sums[SUMS];
    __m512bh factor = _mm512_cvtne2ps_pbh(ones, ones);
    for (int i = 0; i < SUMS; i++) {
        sums[i] = _mm512_setzero_ps();
        OPAQUE(sums[i]);
    }
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], factor, factor);
    return sum_of_lanes(sums);
}

/* A code by a query's number of two bytes is two products of bytes. */
__attribute__((target("avx2"))) static double codes_avx2(float one) {
    int32_t lanes[8];
    __m256i factor = _mm256_set1_epi8((char)one), ones = _mm256_set1_epi16((short)one), sums[SUMS];
    for (int i = 0; i < SUMS; i++) {
        sums[i] = _mm256_setzero_si256();
        OPAQUE(sums[i]);
    }
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++) {
            OPAQUE(factor); /* so that each product is made anew */
            __m256i pairs = _mm256_maddubs_epi16(factor, factor);
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
        }
    double sum = 0;
    for (int i = 0; i < SUMS; i++) {
        _mm256_storeu_si256((__m256i *)lanes, sums[i]);
        for (int lane = 0; lane < 8; lane++) sum += lanes[lane];
    }
    return sum / 2;
}

__attribute__((target("avx512f,avx512vnni"))) static double codes_avx512(float one) {
    __m512i factor = _mm512_set1_epi32(0x01010101 * (int)one), sums[SUMS];
    for (int i = 0; i < SUMS; i++) {
        sums[i] = _mm512_setzero_si512();
        OPAQUE(sums[i]);
    }
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++)
            sums[i] = _mm512_dpbusd_epi32(sums[i], factor, factor);
    double sum = 0;
    for (int i = 0; i < SUMS; i++) sum += _mm512_reduce_add_epi32(sums[i]);
    return sum / 2;
}

static bool has_avx2(void) { return cpu_has_avx2() && cpu_has(bit_FMA); }

#elif defined(__aarch64__)

static double bf16_neon(float one) {
    four_lanes sums[SUMS] = {{0}};
    for (int i = 0; i < SUMS; i++) OPAQUE(sums[i]);
    /* bf16 is the upper half of fp32: each lane of `factor` has two of them. */
    uint32_t bits;
    memcpy(&bits, &one, sizeof(bits));
    bits |= bits >> 16;
    uint32_t factor __attribute__((vector_size(16))) = {bits, bits, bits, bits};
    for (int step = 0; step < STEPS; step++)
        UNROLL for (int i = 0; i < SUMS; i++)
            __asm__(".arch_extension bf16\n\tbfmlalb %0.4s, %1.8h, %1.8h"
                    : "+w"(sums[i]) : "w"(factor));
    double sum = 0;
    for (int i = 0; i < SUMS; i++) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    return sum;
}

#endif

static bool has_any(void) { return true; }

/* By the names of the tables of kernels: how they multiply fp32, keys of bf16, and codes. Where
 * there is no loop for codes, numbers of fp32. */
static const struct {
    const char *kernels;
    bool (*is_here)(void);
    sum_loop *kinds[CXLKV_ARITHMETIC_CODES + 1];
} tables[] = {
    {"serial", has_any, {fma_any, fma_any, fma_any}},
#if defined(__x86_64__)
    {"avx2", has_avx2, {fma_avx2, fma_avx2, codes_avx2}},
    {"avx512", cpu_has_avx512, {fma_avx512, fma_avx512, codes_avx2}},
    {"avx512_bf16", cpu_has_avx512_bf16, {fma_avx512, bf16_avx512, codes_avx512}},
    {"amx", cpu_has_avx512_bf16, {fma_avx512, bf16_avx512, codes_avx512}},
#elif defined(__aarch64__)
    {"neon", has_any, {fma_any, fma_any, fma_any}},
    {"neon_bf16", cpu_has_bf16, {fma_any, bf16_neon, fma_any}},
#endif
};

int cxlkv_arithmetic_run(const char *kernels, uint32_t kind, uint64_t nanoseconds,
                         cxlkv_arithmetic *found) {
    if (kind > CXLKV_ARITHMETIC_CODES)
        return fail(CXLKV_E_ARGUMENT, "kind is 0 to %d, not %u", CXLKV_ARITHMETIC_CODES, kind);
    for (size_t i = 0; i < sizeof(tables) / sizeof(*tables); i++) {
        if (strcmp(tables[i].kernels, kernels) != 0) continue;
        if (!tables[i].is_here()) return fail(ENOTSUP, "this CPU has no %s", kernels);
        sum_loop *loop = tables[i].kinds[kind];
        volatile float one = 1;
        double products = 0;
        uint64_t began_ns = monotonic_ns();
        do {
            products += loop(one);
            found->elapsed_ns = monotonic_ns() - began_ns;
        } while (found->elapsed_ns < nanoseconds);
        found->products = (uint64_t)products;
        return 0;
    }
    return fail(CXLKV_E_ARGUMENT, "no kernels are called \"%s\"", kernels);
}
