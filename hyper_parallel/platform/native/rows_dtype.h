/* Both kernels for logits of one type: DTYPE names it in load_ and store_, STORED is what memory holds, LOWEST -inf;
 * SUMMED_EXP and ROUNDED_EXP are exact enough for their sum and their gradient. */

#define LOAD TARGET(GLUE(load, DTYPE))
#define STORE TARGET(GLUE(store, DTYPE))
#define LOAD_END TARGET(GLUE(load_end, DTYPE))
#define SUM_EXP TARGET(SUMMED_EXP)
#define ROUND_EXP TARGET(ROUNDED_EXP)

/* What a row ends with when that is less than two vectors; -inf, whose exponential is 0, fills them up. */
static inline void LOAD_END(const STORED *x, int64_t n, vf *first, vf *second) {
    STORED end[PAIR];
    for (int64_t i = 0; i < PAIR; i++) end[i] = LOWEST;
    memcpy(end, x, n * sizeof *x);
    LOAD(end, first, second);
}

/* A block, which stays in the first-level cache, is read for its maximum and then for its exponentials. They are summed
 * relative to an anchor, which follows the maximum in steps of more than 2: each costs a rounding error. NaN gets
 * past the maximum, but not past the sum. */
static void TARGET(GLUE(statistics, DTYPE))(const void *row, int64_t classes, float *maximum, float *sum_exp) {
    float m = -INFINITY, anchor = -INFINITY;
    double sum = 0;
    for (int64_t start = 0; start < classes; start += BLOCK) {
        const STORED *x = (const STORED *)row + start;
        int64_t n = classes - start < BLOCK ? classes - start : BLOCK;
        int64_t whole = n - n % PAIR, fours = n - n % (2 * PAIR);
        vf end[2], v[4], largest[4], total[4];
        LOAD_END(x + whole, n - whole, end, end + 1);
        for (int k = 0; k < 4; k++) largest[k] = end[k % 2];
        for (int64_t i = 0; i < fours; i += 2 * PAIR) {
            LOAD(x + i, v, v + 1);
            LOAD(x + i + PAIR, v + 2, v + 3);
            for (int k = 0; k < 4; k++) largest[k] = TARGET(max)(largest[k], v[k]);
        }
        if (fours < whole) {
            LOAD(x + fours, v, v + 1);
            for (int k = 0; k < 2; k++) largest[k] = TARGET(max)(largest[k], v[k]);
        }
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < LANES; j++)
                if (largest[k][j] > m) m = largest[k][j];
        if (m > anchor + 2) {
            sum *= TARGET(exp)(TARGET(all)(anchor - m))[0];
            anchor = m;
        }
        vf a = TARGET(all)(anchor == -INFINITY ? 0.0f : anchor);
        for (int k = 0; k < 4; k++) total[k] = k < 2 ? SUM_EXP(end[k] - a) : TARGET(all)(0.0f);
        for (int64_t i = 0; i < fours; i += 2 * PAIR) {
            LOAD(x + i, v, v + 1);
            LOAD(x + i + PAIR, v + 2, v + 3);
            for (int k = 0; k < 4; k++) total[k] += SUM_EXP(v[k] - a);
        }
        if (fours < whole) {
            LOAD(x + fours, v, v + 1);
            for (int k = 0; k < 2; k++) total[k] += SUM_EXP(v[k] - a);
        }
        vf together = (total[0] + total[1]) + (total[2] + total[3]);
        for (int j = 0; j < LANES; j++) sum += together[j];
    }
    if (m > anchor) sum *= TARGET(exp)(TARGET(all)(anchor - m))[0];
    *maximum = sum != sum && m != INFINITY ? NAN : m;
    *sum_exp = (float)sum;
}

static void TARGET(GLUE(gradient, DTYPE))(const void *row, int64_t classes, float anchor, float factor, void *result) {
    const STORED *x = row;
    STORED *out = result;
    if (factor == 0) {
        memset(out, 0, classes * sizeof *out);
        return;
    }
    if (factor != factor) factor = NAN; /* without what else a NaN may carry */
    vf a = TARGET(all)(anchor), first, second;
    int64_t i = 0;
    for (; i + PAIR <= classes; i += PAIR) {
        LOAD(x + i, &first, &second);
        STORE(out + i, ROUND_EXP(first - a) * factor, ROUND_EXP(second - a) * factor);
    }
    if (i < classes) {
        STORED end[PAIR];
        LOAD_END(x + i, classes - i, &first, &second);
        STORE(end, ROUND_EXP(first - a) * factor, ROUND_EXP(second - a) * factor);
        memcpy(out + i, end, (classes - i) * sizeof *out);
    }
}

#undef LOAD
#undef STORE
#undef LOAD_END
#undef SUM_EXP
#undef ROUND_EXP
