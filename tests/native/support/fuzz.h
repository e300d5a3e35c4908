/* What the fuzzers share. Each defines LLVMFuzzerTestOneInput(), which stops the process when what
 * a reader accepts is out of range, and sets `accepted` when it took the bytes.
 *
 * `make fuzz` builds them for libFuzzer. As tests they go through their corpus, each file also cut
 * short and with each byte changed, under the sanitizers of `make native-test`. A file "crash-..."
 * is what a fuzzer once found; any other one is a seed, and must be accepted: else it would show
 * nothing of what lies behind the first checks. */
#pragma once
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cxlkv.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);

static int accepted; /* by how many readers, the last time */

static inline void demand(bool claim, const char *what) {
    if (claim) return;
    fprintf(stderr, "bytes were accepted with a wrong %s\n", what);
    abort();
}

#ifndef FUZZ
/* On an allocation of just that length, so that a byte more is seen. */
static void try_bytes(const uint8_t *bytes, size_t length) {
    uint8_t *own = malloc(length ? length : 1);
    if (!own) abort();
    memcpy(own, bytes, length);
    LLVMFuzzerTestOneInput(own, length);
    free(own);
}

static void try_file(const char *path, bool is_seed) {
    uint8_t bytes[8192];
    FILE *file = fopen(path, "rb");
    if (!file) abort();
    size_t length = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    try_bytes(bytes, length);
    if (is_seed && !accepted) {
        fprintf(stderr, "%s: not accepted: %s\n", path, cxlkv_error_text());
        abort();
    }
    for (size_t cut = 0; cut <= length; cut++) try_bytes(bytes, cut);
    for (size_t at = 0; at < length; at++)
        for (int change = 0; change < 3; change++) {
            uint8_t before = bytes[at];
            bytes[at] = change == 0 ? (uint8_t)~before : change == 1 ? 0 : (uint8_t)(before + 1);
            try_bytes(bytes, length);
            bytes[at] = before;
        }
}

int main(void) {
    DIR *folder = opendir(FUZZ_CORPUS);
    int count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof(path), "%s/%s", FUZZ_CORPUS, entry->d_name);
        try_file(path, strncmp(entry->d_name, "crash-", 6) != 0);
        count++;
    }
    if (folder) closedir(folder);
    if (count == 0) {
        fprintf(stderr, "no corpus in %s\n", FUZZ_CORPUS);
        return 1;
    }
    printf("%d files, cut and changed\n", count);
    return 0;
}
#endif
