/* AOpt's step in float32 for many vectors, called by `native_step.py`, which defines it.

   A vector's partners are scattered in memory and read once: the time is that of reading them. So they are 16-bit
   integers, the next ones are prefetched while these are added, and sums, products and the step are computed while all
   is in the first-level cache.

   Every sum has one order, in lanes of 16, and no product is fused with a sum: the bytes are the same for any number of
   threads, and on any processor with IEEE 754 arithmetic.

   Shapes: M vectors that move, D dimension. */

#include <stdint.h>

#if defined(__GNUC__)
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define GET_STATE() _mm_getcsr()
#define SET_STATE(state) _mm_setcsr(state)
#else
#define GET_STATE() 0u
#define SET_STATE(state) ((void)(state))
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH
#endif
#define INLINE static inline __attribute__((always_inline))
#define PLAIN_STATE 0x1f80 /* round to nearest, no flushing of small numbers, regardless of the caller */
#define LANES 16
#define LINE 64  /* bytes of a cache line */
#define AHEAD 24 /* partners prefetched before their use: some 18 kB of 384 dimensions, half of a first-level cache */
#define LARGEST 32767
#define TINY 0x1p-110f /* below it, units would not be normal numbers */

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t WholeLanes __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int16_t ShortLanes __attribute__((vector_size(LANES * sizeof(int16_t)), aligned(2), may_alias));

enum { FLOAT32, FLOAT16 };

/* Row n of a matrix has partners index[start[n]] up to index[start[n + 1]]; 4 or 8 bytes a number (`wide`). */
typedef struct {
    const void *start, *index;
    int32_t wide;
} Labels;

INLINE int64_t number(const void *from, int wide, int64_t at) {
    return wide ? ((const int64_t *)from)[at] : ((const int32_t *)from)[at];
}

/* Iterates over the partners of some rows: of each row the positive ones, then the negative ones. */
typedef struct {
    const Labels *labels; /* of both signs */
    const int64_t *row_M;
    int64_t row, last, at, stop;
    int sign;
} PartnerIterator;

/* Returns the next partner, or -1 after the last. */
INLINE int64_t next(PartnerIterator *w) {
    while (w->at == w->stop) {
        if (w->sign == 1 && ++w->row >= w->last) return w->row = w->last, -1;
        w->sign = !w->sign;
        const Labels *side = w->labels + w->sign;
        w->at = number(side->start, side->wide, w->row_M[w->row]);
        w->stop = number(side->start, side->wide, w->row_M[w->row] + 1);
    }
    const Labels *side = w->labels + w->sign;
    return number(side->index, side->wide, w->at++);
}

/* Partner q is `unit_Q[q]` times its integers. */
INLINE void prefetch_next(PartnerIterator *w, const int16_t *whole_QD, const float *unit_Q, int dimension) {
    const int64_t partner = next(w);
    if (partner < 0) return;
    const int16_t *row = whole_QD + partner * dimension;
    for (int d = 0; d < dimension; d += LINE / (int)sizeof(int16_t)) __builtin_prefetch(row + d);
    __builtin_prefetch(row + dimension - 1);
    __builtin_prefetch(unit_Q + partner);
}

INLINE void add(float *sum, const int16_t *row, const float unit, int dimension) {
    int d = 0;
    for (; d + LANES <= dimension; d += LANES) {
        const WholeLanes whole = __builtin_convertvector(*(const ShortLanes *)(row + d), WholeLanes);
        *(Lanes *)(sum + d) += __builtin_convertvector(whole, Lanes) * unit;
    }
    for (; d < dimension; d++) sum[d] += (float)row[d] * unit;
}

/* Both are padded to whole lanes with zeros. */
INLINE float dot(const float *x, const float *y, int padded) {
    Lanes sum = {0};
    for (int d = 0; d < padded; d += LANES) sum += *(const Lanes *)(x + d) * *(const Lanes *)(y + d);
    float lane[LANES];
    memcpy(lane, &sum, sizeof lane);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Exact; infinities and NaN are kept. */
INLINE void widen(const uint16_t *half, float *to, int count) {
    for (int i = 0; i < count; i++) {
        const uint32_t rest = half[i] & 0x7fff;
        const float small = (float)(int32_t)rest * 0x1p-24f; /* the value of a subnormal number */
        uint32_t bits;
        memcpy(&bits, &small, sizeof bits);
        const uint32_t large = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
        bits = (rest < 0x400 ? bits : large) | (uint32_t)(half[i] & 0x8000) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* Rounds rows `first` up to `last` to integers of their own unit, the largest being LARGEST; to even on ties.
   A row of numbers below TINY is zero, and the unit of a row with an infinity or NaN is NaN. */
EACH void mvr_round(const float *rows, int64_t first, int64_t last, int dimension, int16_t *whole, float *unit) {
    const unsigned state = GET_STATE();
    SET_STATE(PLAIN_STATE);
    for (int64_t row = first; row < last; row++) {
        const float *from = rows + row * dimension;
        float largest = 0, nan = 0;
        for (int d = 0; d < dimension; d++) {
            const float size = from[d] < 0 ? -from[d] : from[d];
            largest = size > largest ? size : largest;
            nan += from[d] * 0;
        }
        const int zero = largest < TINY || nan != 0;
        const float inverse = zero ? 0 : LARGEST / largest;
        unit[row] = largest < TINY ? nan : largest / LARGEST + nan;
        for (int d = 0; d < dimension; d++) {
            const float near = zero ? 0 : from[d] * inverse + 0x1.8p23f; /* floats there are integers apart */
            whole[row * dimension + d] = (int16_t)(int32_t)(near - (zero ? 0 : 0x1.8p23f));
        }
    }
    SET_STATE(state);
}

/* Steps vectors `row_M[first]` up to `row_M[last]`: moved_MD, and in score_M2 the products <x, A> and <x, B>.
   `space` holds three vectors of whole lanes, and is zero. */
EACH void mvr_step(int kind, const void *vectors, const int16_t *whole_QD, const float *unit_Q, int dimension,
                   const Labels *labels, const int64_t *row_M, int64_t first, int64_t last, float step_size,
                   float *moved_MD, float *score_M2, float *space) {
    const unsigned state = GET_STATE();
    SET_STATE(PLAIN_STATE);
    const int padded = (dimension + LANES - 1) / LANES * LANES;
    float *x = space, *sum[2] = {space + padded, space + 2 * padded};
    PartnerIterator ahead = {labels, row_M, first - 1, last, 0, 0, 1};
    for (int i = 0; i < AHEAD; i++) prefetch_next(&ahead, whole_QD, unit_Q, dimension);
    for (int64_t m = first; m < last; m++) {
        const int64_t row = row_M[m];
        if (kind == FLOAT16) widen((const uint16_t *)vectors + row * dimension, x, dimension);
        else memcpy(x, (const float *)vectors + row * dimension, dimension * sizeof(float));
        for (int sign = 0; sign < 2; sign++) {
            const Labels *side = labels + sign;
            const int64_t stop = number(side->start, side->wide, row + 1);
            memset(sum[sign], 0, dimension * sizeof(float));
            for (int64_t at = number(side->start, side->wide, row); at < stop; at++) {
                const int64_t partner = number(side->index, side->wide, at);
                prefetch_next(&ahead, whole_QD, unit_Q, dimension);
                add(sum[sign], whole_QD + partner * dimension, unit_Q[partner], dimension);
            }
        }
        const float positive = dot(x, sum[0], padded), total = positive + dot(x, sum[1], padded);
        score_M2[2 * m] = positive, score_M2[2 * m + 1] = total;
        const float from_total = step_size / total, to_positive = step_size / positive - from_total;
        float *out = moved_MD + m * dimension;
        for (int d = 0; d < dimension; d++) out[d] = x[d] + sum[0][d] * to_positive - sum[1][d] * from_total;
    }
    SET_STATE(state);
}
#endif

/* Increase the number when arguments or structs change, here and in `native_step.py`. */
int mvr_interface(void) { return 2; }
