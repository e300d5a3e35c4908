/* A second opinion for `cxlkv bench agree`: STREAM-like loops that share nothing with the core.
 * usage: agree BYTES; prints GB/s of reading in a row, and ns a load that depends on the last. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>

enum { PASSES = 5, HOPS = 400000, LINE_WORDS = 8 };

static double now_s(void) {
    struct timeval now;
    gettimeofday(&now, NULL);
    return (double)now.tv_sec + (double)now.tv_usec * 1e-6;
}

static double read_in_a_row(const uint64_t *numbers, size_t count, uint64_t *total) {
    double began_s = now_s();
    for (int pass = 0; pass < PASSES; pass++) {
        uint64_t sum = 0;
        for (size_t i = 0; i < count; i++) sum += numbers[i];
        *total += sum;
        __asm__ volatile("" ::: "memory"); /* or all passes would be one */
    }
    return now_s() - began_s;
}

/* A cycle through all lines: each visited line, in an order drawn by random(), names the next. */
static void link_lines(uint64_t *words, size_t lines) {
    size_t *order = malloc(lines * sizeof(*order));
    if (!order) exit(2);
    for (size_t i = 0; i < lines; i++) order[i] = i;
    for (size_t i = lines - 1; i > 0; i--) {
        size_t other = (size_t)random() % (i + 1), moved = order[i];
        order[i] = order[other];
        order[other] = moved;
    }
    for (size_t i = 0; i < lines; i++)
        words[order[i] * LINE_WORDS] = order[(i + 1) % lines] * LINE_WORDS;
    free(order);
}

int main(int count, char **arguments) {
    size_t bytes = count == 2 ? strtoull(arguments[1], NULL, 10) / 4096 * 4096 : 0;
    if (!bytes) return 2;
    uint64_t *words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) return 2;
    madvise(words, bytes, MADV_HUGEPAGE);
    link_lines(words, bytes / 64);
    uint64_t total = 0;
    read_in_a_row(words, bytes / 8, &total);
    double read_s = read_in_a_row(words, bytes / 8, &total);
    size_t at = 0;
    double began_s = now_s();
    for (int hop = 0; hop < HOPS; hop++) at = words[at];
    double chase_s = now_s() - began_s;
    fprintf(stderr, "%lu %zu\n", (unsigned long)total, at);
    printf("%f %f\n", PASSES * (double)bytes / read_s / 1e9, chase_s / HOPS * 1e9);
    return 0;
}
