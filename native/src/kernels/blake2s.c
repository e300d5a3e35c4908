/* BLAKE2s (RFC 7693): the rounds are written once, for words and for vectors of eight words. */
#include "kernels/blake2s.h"

#include <string.h>

#include "kernels/kernels.h"

static const uint32_t start_words[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* A vector of GCC and clang: it becomes the registers that the target has, however wide. */
typedef uint32_t lanes __attribute__((vector_size(4 * BLAKE2S_LANES)));

#define INLINE static inline __attribute__((always_inline))

#define TURN(word, bits) ((word) >> (bits) | (word) << (32 - (bits)))
#define MIX(a, b, c, d, x, y)      \
    do {                           \
        a += b + (x);              \
        d = TURN(d ^ a, 16);       \
        c += d;                    \
        b = TURN(b ^ c, 12);       \
        a += b + (y);              \
        d = TURN(d ^ a, 8);        \
        c += d;                    \
        b = TURN(b ^ c, 7);        \
    } while (0)
/* One round: the columns, then the diagonals, on the message's words in the round's own order. */
#define ROUND(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)      \
    do {                                                           \
        MIX(v[0], v[4], v[8], v[12], message[a], message[b]);      \
        MIX(v[1], v[5], v[9], v[13], message[c], message[d]);      \
        MIX(v[2], v[6], v[10], v[14], message[e], message[f]);     \
        MIX(v[3], v[7], v[11], v[15], message[g], message[h]);     \
        MIX(v[0], v[5], v[10], v[15], message[i], message[j]);     \
        MIX(v[1], v[6], v[11], v[12], message[k], message[l]);     \
        MIX(v[2], v[7], v[8], v[13], message[m], message[n]);      \
        MIX(v[3], v[4], v[9], v[14], message[o], message[p]);      \
    } while (0)
#define ROUNDS                                                             \
    do {                                                                   \
        ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);       \
        ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);       \
        ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);       \
        ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);       \
        ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);       \
        ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);       \
        ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);       \
        ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);       \
        ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);       \
        ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);       \
    } while (0)

static void compress(blake2s *state, const uint32_t message[BLAKE2S_BLOCK_WORDS], uint32_t last) {
    uint32_t v[16];
    for (int i = 0; i < 8; i++) {
        v[i] = state->h[i];
        v[i + 8] = start_words[i];
    }
    v[12] ^= (uint32_t)state->bytes;
    v[13] ^= (uint32_t)(state->bytes >> 32);
    v[14] ^= last;
    ROUNDS;
    for (int i = 0; i < 8; i++) state->h[i] ^= v[i] ^ v[i + 8];
}

void blake2s_begin(blake2s *state, uint32_t digest_bytes, const char purpose[8], uint64_t salt) {
    uint32_t person[2];
    memcpy(person, purpose, sizeof(person));
    *state = (blake2s){.bytes = 0};
    memcpy(state->h, start_words, sizeof(start_words));
    state->h[0] ^= 1u << 24 | 1u << 16 | digest_bytes; /* depth 1, fanout 1, no key */
    state->h[4] ^= (uint32_t)salt;
    state->h[5] ^= (uint32_t)(salt >> 32);
    state->h[6] ^= person[0];
    state->h[7] ^= person[1];
}

void blake2s_block(blake2s *state, const uint32_t block[BLAKE2S_BLOCK_WORDS]) {
    state->bytes += 4 * BLAKE2S_BLOCK_WORDS;
    compress(state, block, 0);
}

void blake2s_last(blake2s *state, const uint32_t block[BLAKE2S_BLOCK_WORDS], uint32_t bytes) {
    state->bytes += bytes;
    compress(state, block, UINT32_MAX);
}

/* Word w of message l is vector w's lane l. */
INLINE void gather(const int64_t *numbers, uint32_t count, uint32_t at, lanes *message,
                   lanes *high) {
    for (uint32_t word = 0; word < BLAKE2S_BLOCK_WORDS; word++) {
        message[word] = (lanes){0};
        for (uint32_t lane = 0; lane < BLAKE2S_LANES && at + word < count; lane++) {
            uint64_t number = (uint64_t)numbers[(size_t)lane * count + at + word];
            message[word][lane] = (uint32_t)number;
            (*high)[lane] |= (uint32_t)(number >> 32);
        }
    }
}

/* `bytes` of each lane's message are compressed then. By their address: a vector as an argument
 * is one that compilers warn of where it is wider than the CPU's registers, inlined or not. */
INLINE void lanes_compress(lanes h[8], const lanes message[BLAKE2S_BLOCK_WORDS],
                           const lanes *bytes, uint32_t bytes_high, uint32_t last) {
    lanes v[16];
    for (int i = 0; i < 8; i++) {
        v[i] = h[i];
        v[i + 8] = (lanes){0} + start_words[i];
    }
    v[12] ^= *bytes;
    v[13] ^= bytes_high;
    v[14] ^= last;
    ROUNDS;
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

INLINE void lanes_hash(const blake2s *start, const int64_t *numbers, uint32_t count,
                       uint32_t out[BLAKE2S_LANES][8], uint32_t high[BLAKE2S_LANES]) {
    lanes h[8], any = {0};
    for (int i = 0; i < 8; i++) h[i] = (lanes){0} + start->h[i];
    for (uint32_t at = 0; at < count; at += BLAKE2S_BLOCK_WORDS) {
        lanes message[BLAKE2S_BLOCK_WORDS];
        uint32_t end = count - at <= BLAKE2S_BLOCK_WORDS ? count : at + BLAKE2S_BLOCK_WORDS;
        gather(numbers, count, at, message, &any);
        lanes ends = (lanes){0} + 4 * end;
        lanes_compress(h, message, &ends, end >> 30, end == count ? UINT32_MAX : 0);
    }
    for (int lane = 0; lane < BLAKE2S_LANES; lane++) {
        for (int i = 0; i < 8; i++) out[lane][i] = h[i][lane];
        high[lane] = any[lane];
    }
}

INLINE void lanes_last(const blake2s *start,
                       const uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS],
                       const uint32_t bytes[BLAKE2S_LANES], uint32_t out[BLAKE2S_LANES][8]) {
    lanes h[8], message[BLAKE2S_BLOCK_WORDS], ends;
    for (int i = 0; i < 8; i++) h[i] = (lanes){0} + start->h[i];
    for (int lane = 0; lane < BLAKE2S_LANES; lane++) {
        ends[lane] = (uint32_t)start->bytes + bytes[lane];
        for (int word = 0; word < BLAKE2S_BLOCK_WORDS; word++)
            message[word][lane] = blocks[lane][word];
    }
    lanes_compress(h, message, &ends, (uint32_t)(start->bytes >> 32), UINT32_MAX);
    for (int lane = 0; lane < BLAKE2S_LANES; lane++)
        for (int i = 0; i < 8; i++) out[lane][i] = h[i][lane];
}

static void lanes_plain(const blake2s *start, const int64_t *numbers, uint32_t count,
                        uint32_t h[BLAKE2S_LANES][8], uint32_t high[BLAKE2S_LANES]) {
    lanes_hash(start, numbers, count, h, high);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void lanes_avx2(const blake2s *start, const int64_t *numbers,
                                                       uint32_t count,
                                                       uint32_t h[BLAKE2S_LANES][8],
                                                       uint32_t high[BLAKE2S_LANES]) {
    lanes_hash(start, numbers, count, h, high);
}
#endif

void blake2s_lanes(const blake2s *start, const int64_t *numbers, uint32_t count,
                   uint32_t h[BLAKE2S_LANES][8], uint32_t high[BLAKE2S_LANES]) {
#if defined(__x86_64__)
    if (kernels_current() != &kernels_serial) { /* all others have AVX2 */
        lanes_avx2(start, numbers, count, h, high);
        return;
    }
#endif
    lanes_plain(start, numbers, count, h, high);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void last_avx2(
    const blake2s *start, const uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS],
    const uint32_t bytes[BLAKE2S_LANES], uint32_t h[BLAKE2S_LANES][8]) {
    lanes_last(start, blocks, bytes, h);
}
#endif

void blake2s_last_lanes(const blake2s *start,
                        const uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS],
                        const uint32_t bytes[BLAKE2S_LANES], uint32_t h[BLAKE2S_LANES][8]) {
#if defined(__x86_64__)
    if (kernels_current() != &kernels_serial) { /* all others have AVX2 */
        last_avx2(start, blocks, bytes, h);
        return;
    }
#endif
    lanes_last(start, blocks, bytes, h);
}
