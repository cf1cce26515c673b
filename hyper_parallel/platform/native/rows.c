/* The loss's arithmetic on the rows of a matrix of logits: each goes through memory once, and no further than the cache.
 *
 * Built without Python's headers and called through ctypes (rows.py). Vectors are those of GCC's and Clang's language
 * extension, so that one text serves every processor; rows_target.h has the arithmetic, for one width of them.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)

#if defined(__AVX512BW__)
#define BASE_WIDTH 64
#elif defined(__AVX2__)
#define BASE_WIDTH 32
#else
#define BASE_WIDTH 16
#endif

#define TARGET(name) GLUE(name, base)
#define WIDTH BASE_WIDTH
#include "rows_target.h"
#undef TARGET
#undef WIDTH

/* What the compiler may not take for granted is compiled besides, and chosen when it is there. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && BASE_WIDTH < 64
#define WIDER 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define TARGET(name) GLUE(name, avx2)
#define WIDTH 32
#include "rows_target.h"
#undef TARGET
#undef WIDTH
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define TARGET(name) GLUE(name, avx512)
#define WIDTH 64
#include "rows_target.h"
#undef TARGET
#undef WIDTH
#pragma GCC pop_options
#endif

enum { FLOAT32, BFLOAT16, FLOAT16, DTYPES };

typedef void statistics_of(const void *x, int64_t classes, float *maximum, float *sum_exp);
typedef void gradient_of(const void *x, int64_t classes, float anchor, float factor, void *out);

#define OF_DTYPES(kernel, target) {kernel##_f32_##target, kernel##_bf16_##target, kernel##_f16_##target}

static statistics_of *const STATISTICS[][DTYPES] = {
    OF_DTYPES(statistics, base),
#ifdef WIDER
    OF_DTYPES(statistics, avx2),
    OF_DTYPES(statistics, avx512),
#endif
};

static gradient_of *const GRADIENT[][DTYPES] = {
    OF_DTYPES(gradient, base),
#ifdef WIDER
    OF_DTYPES(gradient, avx2),
    OF_DTYPES(gradient, avx512),
#endif
};

/* What rows.py was written for; it changes with what follows. */
int hyper_parallel_rows_interface(void) { return 1; }

/* The best of the compiled targets that this processor runs: 0, 1 (AVX2) or 2 (AVX-512); the lower ones run as well. */
int hyper_parallel_best_target(void) {
#ifdef WIDER
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

/* Per row the maximum, and the sum of exponentials relative to it (to 0 where it is -inf); -inf and 0 of rows that are
 * not needed. Strides are in bytes; `needed` may be null. */
void hyper_parallel_row_statistics(int target, int dtype, const char *x, int64_t stride, int64_t rows, int64_t classes,
                                   const uint8_t *needed, float *maximum, float *sum_exp) {
    for (int64_t i = 0; i < rows; i++) {
        if (needed == 0 || needed[i]) {
            STATISTICS[target][dtype](x + i * stride, classes, maximum + i, sum_exp + i);
        } else {
            maximum[i] = -INFINITY;
            sum_exp[i] = 0;
        }
    }
}

/* out = exp(x - anchor) factor, rounded once; rows of factor 0 are 0 whatever x is. `out` may be `x`. */
void hyper_parallel_row_gradients(int target, int dtype, const char *x, int64_t stride, char *out, int64_t out_stride,
                                  int64_t rows, int64_t classes, const float *anchor, const float *factor) {
    for (int64_t i = 0; i < rows; i++)
        GRADIENT[target][dtype](x + i * stride, classes, anchor[i], factor[i], out + i * out_stride);
}
