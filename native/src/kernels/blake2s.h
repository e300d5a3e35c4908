/* BLAKE2s (RFC 7693), unkeyed: of one message, or of eight side by side. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { BLAKE2S_BLOCK_WORDS = 16, BLAKE2S_LANES = 8 };

/* A hash of its own for each purpose, length of the digest and salt, as hashlib.blake2s has them:
 * digest_size=digest_bytes, person=purpose, salt=salt.to_bytes(8, "little"). */
typedef struct blake2s {
    uint32_t h[8];
    uint64_t bytes;              /* compressed so far */
} blake2s;

void blake2s_begin(blake2s *state, uint32_t digest_bytes, const char purpose[8], uint64_t salt);
/* A whole block that is not the last. */
void blake2s_block(blake2s *state, const uint32_t block[BLAKE2S_BLOCK_WORDS]);
/* The last block, of which `bytes` count and the rest is zero. The digest is then the first bytes
 * of h, words from the low byte on. */
void blake2s_last(blake2s *state, const uint32_t block[BLAKE2S_BLOCK_WORDS], uint32_t bytes);
/* The same of eight messages that begin alike, each with a last block of its own. */
void blake2s_last_lanes(const blake2s *start,
                        const uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS],
                        const uint32_t bytes[BLAKE2S_LANES], uint32_t h[BLAKE2S_LANES][8]);
/* h of eight messages of `count` words: the low halves of so many 64-bit numbers. Returns the high
 * halves, or-ed, by message. */
void blake2s_lanes(const blake2s *start, const int64_t *numbers, uint32_t count,
                   uint32_t h[BLAKE2S_LANES][8], uint32_t high[BLAKE2S_LANES]);
