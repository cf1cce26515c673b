/* The kernels for one set of instructions: TARGET(name) names them, WIDTH is the bytes of a vector. */

#define LANES (WIDTH / 4)
#define PAIR (2 * LANES)
#define BLOCK (PAIR * 64)

typedef float TARGET(vf) __attribute__((vector_size(WIDTH)));
typedef int32_t TARGET(vi) __attribute__((vector_size(WIDTH)));
typedef uint32_t TARGET(vu) __attribute__((vector_size(WIDTH)));
#define vf TARGET(vf)
#define vi TARGET(vi)
#define vu TARGET(vu)

static inline vf TARGET(all)(float x) { return x - (vf){0}; }

/* The larger one; x where y is NaN. */
static inline vf TARGET(max)(vf x, vf y) {
    vi larger = y > x;
    return (vf)(((vi)y & larger) | ((vi)x & ~larger));
}

/* exp(x) to within one unit in the last place, for x <= 88; 0 for x < -87, where fp32's normal numbers end.
 *
 * 2^n exp(r) with n = x / ln 2 rounded and r = x - n ln 2, ln 2 in two parts of which the first has few bits. Adding
 * 1.5 * 2^23 leaves n, rounded, in the low bits. The polynomial is the one of degree 6 with the least largest relative
 * error for |r| <= ln 2 / 2, its first two coefficients being 1: 3e-9. */
static inline vf TARGET(exp)(vf x) {
    const float rounder = 0x1.8p23f;
    vf shifted = x * 0x1.715476p+0f + rounder;
    vf n = shifted - rounder;
    vf r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
    vf p = r * 0x1.6a4ce4p-10f + 0x1.123988p-7f;
    p = p * r + 0x1.5558bp-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vf power = (vf)(((vu)shifted + 127) << 23);
    return (vf)((vi)(p * power) & ~(vi)(x < -87.0f));
}

/* For logits in half precision, cheaper: 2^n 2^r with n = x / ln 2 rounded and |r| <= 1/2, the exponent added to the bits of
 * a polynomial whose first coefficient is 1. Of a NaN the lower half must be 0, as it is when it comes from a half. */
static inline vf TARGET(scaled)(vf p, vf shifted, vf x) {
    return (vf)(((vu)p + ((vu)shifted << 23)) & ~(vu)(x < -87.0f));
}

/* To be summed: the polynomial's error is 9e-8, what r loses 1e-8 of x. */
static inline vf TARGET(half_exp)(vf x) {
    vf shifted = x * 0x1.715476p+0f + 0x1.8p23f;
    vf r = x * 0x1.715476p+0f - (shifted - 0x1.8p23f);
    vf p = r * 0x1.5bd6bp-10f + 0x1.3ce8d4p-7f;
    p = p * r + 0x1.c6b6ep-5f;
    p = p * r + 0x1.ebf9c2p-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1.0f;
    return TARGET(scaled)(p, shifted, x);
}

/* To be rounded to 11 bits or fewer: 3e-6. */
static inline vf TARGET(coarse_exp)(vf x) {
    vf shifted = x * 0x1.715476p+0f + 0x1.8p23f;
    vf r = x * 0x1.715476p+0f - (shifted - 0x1.8p23f);
    vf p = r * 0x1.3a01a4p-7f + 0x1.c9fcd6p-5f;
    p = p * r + 0x1.ec037ep-3f;
    p = p * r + 0x1.62e12cp-1f;
    p = p * r + 1.0f;
    return TARGET(scaled)(p, shifted, x);
}

/* Two vectors of numbers from memory, and back. Halves stay where they are in words of 32 bits, the first of two in the
 * lower half: moving them across the vector would cost more than the arithmetic. */

static inline void TARGET(load_f32)(const float *x, vf *first, vf *second) {
    memcpy(first, x, sizeof *first);
    memcpy(second, x + LANES, sizeof *second);
}

static inline void TARGET(store_f32)(float *x, vf first, vf second) {
    memcpy(x, &first, sizeof first);
    memcpy(x + LANES, &second, sizeof second);
}

static inline void TARGET(load_bf16)(const uint16_t *x, vf *first, vf *second) {
    vu both;
    memcpy(&both, x, sizeof both);
    *first = (vf)(both << 16);
    *second = (vf)(both & 0xffff0000);
}

/* To the nearest, ties to even, in the upper half. Right for NaN whose lower half is 0. */
static inline vu TARGET(rounded_bf16)(vf v) { return (vu)v + 0x7fff + (((vu)v >> 16) & 1); }

static inline void TARGET(store_bf16)(uint16_t *x, vf first, vf second) {
    vu both = (TARGET(rounded_bf16)(first) >> 16) | (TARGET(rounded_bf16)(second) & 0xffff0000);
    memcpy(x, &both, sizeof both);
}

static inline vf TARGET(from_f16)(vu half) {
    vf f = (vf)((half & 0x7fff) << 13) * 0x1p112f; /* subnormal numbers come out right as well */
    vu special = (vu)(f >= 65536.0f) & 0x7f800000;
    return (vf)((vu)f | special | ((half & 0x8000) << 16));
}

static inline vu TARGET(to_f16)(vf v) {
    vu sign = ((vu)v >> 16) & 0x8000, magnitude = (vu)v & 0x7fffffff;
    vf a = (vf)magnitude;
    /* below 2^-14 fp16's numbers are the multiples of 2^-24, as fp32's are from 0.5 to 1 */
    vu small = (vu)(a + 0.5f) - 0x3f000000, is_small = (vu)(a < 0x1p-14f);
    vu normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    vu is_large = (vu)(a >= 65520.0f), is_nan = (vu)(v != v);
    vu out = (small & is_small) | (normal & ~is_small);
    out = (out & ~is_large) | (0x7c00 & is_large);
    out = (out & ~is_nan) | (0x7e00 & is_nan);
    return out | sign;
}

static inline void TARGET(load_f16)(const uint16_t *x, vf *first, vf *second) {
    vu both;
    memcpy(&both, x, sizeof both);
    *first = TARGET(from_f16)(both & 0xffff);
    *second = TARGET(from_f16)(both >> 16);
}

static inline void TARGET(store_f16)(uint16_t *x, vf first, vf second) {
    vu both = TARGET(to_f16)(first) | (TARGET(to_f16)(second) << 16);
    memcpy(x, &both, sizeof both);
}

#define DTYPE f32
#define STORED float
#define LOWEST -INFINITY
#define SUMMED_EXP exp
#define ROUNDED_EXP exp
#include "rows_dtype.h"
#undef DTYPE
#undef STORED
#undef LOWEST
#undef SUMMED_EXP
#undef ROUNDED_EXP

#define STORED uint16_t
#define SUMMED_EXP half_exp
#define ROUNDED_EXP coarse_exp
#define DTYPE bf16
#define LOWEST 0xff80
#include "rows_dtype.h"
#undef DTYPE
#undef LOWEST

#define DTYPE f16
#define LOWEST 0xfc00
#include "rows_dtype.h"
#undef DTYPE
#undef LOWEST
#undef STORED
#undef SUMMED_EXP
#undef ROUNDED_EXP

#undef vf
#undef vi
#undef vu
#undef LANES
#undef PAIR
#undef BLOCK
