/* kernels_amx.c once more, on tiles in software: part of test_kernels on a CPU that has no others.
 * What the rest of its table needs is AVX-512 BF16. */
#if defined(__x86_64__)
#include <immintrin.h> /* first: it defines the true operations */
#include "tile_model.h"

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig model_load_config
#define _tile_loadd model_load
#define _tile_stored model_store
#define _tile_zero model_zero
#define _tile_dpbf16ps model_dot
#define _tile_release model_release

#define CXLKV_TILE_MODEL
#define TABLE kernels_amx_model
#include "kernels/kernels.h"
extern const kernels kernels_amx_model;
#include "kernels/amx.c"
#else
/* A translation unit may not be empty. */
typedef int kernels_amx_model_is_for_x86_64_only;
#endif
