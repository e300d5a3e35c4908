/* Goal: rows that objects keep encoded come back about as they were, and no byte beside them is
 * read or written. Method: each encoding, dtype and some sizes, from and to memory of its own for
 * each buffer, whose ends a sanitizer watches; bytes behind the rows; forms that there are not. */
#include "object_tests.h"

enum { OBJECT_BYTES = 1 << 20, FOOT_BYTES = 9 };

/* Of a row's squares, at most so much is lost by each encoding. */
static const float lost_max[] = {0, 2e-4f, 0.05f, 0.02f};

static float number_at(const uint8_t *bytes, uint32_t dtype, size_t i) {
    uint32_t bits = 0;
    float number;
    if (dtype == CXLKV_FLOAT32) memcpy(&bits, bytes + 4 * i, 4);
    else memcpy((uint8_t *)&bits + 2, bytes + 2 * i, 2); /* the upper half of a float32 */
    memcpy(&number, &bits, 4);
    return number;
}

static void rows_make(uint8_t *bytes, uint32_t dtype, size_t count, uint64_t *seed) {
    for (size_t i = 0; i < count; i++) {
        float number = (float)random_below(seed, 2001) / 100 - 10;
        if (dtype == CXLKV_FLOAT32) memcpy(bytes + 4 * i, &number, 4);
        else memcpy(bytes + 2 * i, (uint8_t *)&number + 2, 2);
    }
}

static void expect_near(const uint8_t *was, const uint8_t *now, const cxlkv_row_form *form,
                        size_t count) {
    float lost = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        float a = number_at(was, form->dtype, i), b = number_at(now, form->dtype, i);
        lost += (a - b) * (a - b);
        all += a * a;
    }
    CHECK(lost <= lost_max[form->encoding] * all);
    CHECK(count < 64 || lost > 0);
}

static uint8_t *room(uint64_t bytes) {
    uint8_t *made = calloc(bytes, 1);
    CHECK(made);
    return made;
}

static void round_trip(cxlkv_pool *pool, uint64_t name, cxlkv_row_form form, uint32_t rows,
                       uint64_t *seed) {
    size_t count = (size_t)rows * form.dim, bytes = count * (form.dtype == CXLKV_FLOAT32 ? 4 : 2);
    const cxlkv_row_form forms[2] = {form, form};
    uint8_t *put[3] = {room(bytes), room(bytes), room(FOOT_BYTES)};
    uint8_t *got[3] = {room(bytes), room(bytes), room(FOOT_BYTES)};
    uint64_t sizes[3] = {bytes, bytes, FOOT_BYTES}, starts[2] = {0, 3}, from[3], to[3];
    for (int i = 0; i < 3; i++) from[i] = (uintptr_t)put[i];
    for (int i = 0; i < 3; i++) to[i] = (uintptr_t)got[i];
    for (int i = 0; i < 2; i++) rows_make(put[i], form.dtype, count, seed);
    fill(put[2], name, FOOT_BYTES);
    cxlkv_buffers memory = {.addresses = from, .sizes = sizes, .starts = starts, .forms = forms,
                            .form_count = 2};
    int64_t size, stored = 2 * cxlkv_row_form_bytes(&form, bytes) + FOOT_BYTES;
    int32_t code;
    CHECK(cxlkv_objects_put(pool, 1, key_of(name).bytes, &memory, 0, &code) == 1);
    memory.addresses = to;
    CHECK(cxlkv_objects_get(pool, 1, key_of(name).bytes, &memory, &size) == stored);
    CHECK(size == stored);
    for (int i = 0; i < 2; i++) expect_near(put[i], got[i], &form, count);
    CHECK(memcmp(put[2], got[2], FOOT_BYTES) == 0);
    sizes[2]++;
    CHECK(cxlkv_objects_get(pool, 1, key_of(name).bytes, &memory, &size) == -CXLKV_E_ARGUMENT);
    for (int i = 0; i < 3; i++) free(put[i]);
    for (int i = 0; i < 3; i++) free(got[i]);
}

static void test_round_trips(bool checksum, uint32_t threads, uint64_t *seed) {
    static const uint32_t dims[] = {1, 40, 64, 80, 128}, rows[] = {1, 15, 16, 63, 64, 65, 130};
    static const uint32_t dtypes[] = {CXLKV_BFLOAT16, CXLKV_FLOAT32};
    cxlkv_pool *pool = object_pool(NULL, OBJECT_BYTES, checksum, 256 << 20, threads);
    uint64_t name = 0;
    for (uint32_t encoding = CXLKV_ENCODING_INT8; encoding <= CXLKV_ENCODING_FP8_E4M3; encoding++)
        for (int t = 0; t < 2; t++)
            for (int d = 0; d < 5; d++)
                for (int r = 0; r < 7; r++, name++)
                    round_trip(pool, name, (cxlkv_row_form){encoding, dtypes[t], dims[d]}, rows[r],
                               seed);
    test_end(&pool, NULL);
}

static void test_forms_that_there_are_not(void) {
    static const cxlkv_row_form wrong[] = {
        {CXLKV_ENCODING_PROGRESSIVE, CXLKV_BFLOAT16, 64}, {99, CXLKV_BFLOAT16, 64},
        {CXLKV_ENCODING_INT8, CXLKV_BYTES, 64}, {CXLKV_ENCODING_INT8, 99, 64},
        {CXLKV_ENCODING_INT8, CXLKV_BFLOAT16, 0}, {CXLKV_ENCODING_INT8, CXLKV_BFLOAT16, 1025},
        {CXLKV_ENCODING_INT8, CXLKV_BFLOAT16, 60}, /* no whole number of rows */
    };
    for (uint64_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        CHECK(cxlkv_row_form_bytes(&wrong[i], 128) == -CXLKV_E_ARGUMENT);
    const cxlkv_row_form right = {CXLKV_ENCODING_INT8, CXLKV_FLOAT16, 64}, none = {0, 99, 0};
    CHECK(cxlkv_row_form_bytes(&right, 0) == 0);
    CHECK(cxlkv_row_form_bytes(&right, UINT64_MAX / 128 * 128) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_row_form_bytes(&none, 131) == 131);
}

int main(void) {
    uint64_t seed = test_seed();
    test_forms_that_there_are_not();
    test_round_trips(true, 1, &seed);
    test_round_trips(false, 2, &seed);
    return 0;
}
