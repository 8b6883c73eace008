/* AOpt's step in float32 for many vectors; `native_step.py` calls it, and says what it means.

   A vector's partners lie all over memory and are read once: the time is that of reading them. So they are read as
   whole numbers of 16 bits, those that come next are asked for while these are added, and sums, products and the step
   are made while all is in the first cache.

   Every sum has one order, written in lanes of 16, and no product is fused with a sum: the bytes are the same for any
   number of threads, and on any processor that computes as IEEE 754 has it.

   Shapes: M vectors that move, D dimension. */

#include <stdint.h>

#if defined(__GNUC__)
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH
#endif
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define LINE 64  /* bytes of memory that come at once */
#define AHEAD 24 /* partners asked for before their use: some 18 kB of 384 dimensions, half of a first cache */
#define MOST 32767
#define TINY 0x1p-110f /* of less, units would not be normal numbers */

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

/* All partners of some rows, one after the other: of each row the positive ones, then the negative ones. */
typedef struct {
    const Labels *labels; /* of both signs */
    const int64_t *row_M;
    int64_t row, last, at, stop;
    int sign;
} Walk;

/* The next partner, or -1 behind the last. */
INLINE int64_t next(Walk *w) {
    while (w->at == w->stop) {
        if (w->sign == 1 && ++w->row >= w->last) return w->row = w->last, -1;
        w->sign = !w->sign;
        const Labels *own = w->labels + w->sign;
        w->at = number(own->start, own->wide, w->row_M[w->row]);
        w->stop = number(own->start, own->wide, w->row_M[w->row] + 1);
    }
    const Labels *own = w->labels + w->sign;
    return number(own->index, own->wide, w->at++);
}

/* Partner q is `unit_Q[q]` times its whole numbers. */
typedef struct {
    const int16_t *whole_QD;
    const float *unit_Q;
} Partners;

INLINE void ask_for(const Partners *from, int64_t partner, int dimension) {
    const int16_t *row = from->whole_QD + partner * dimension;
    for (int d = 0; d < dimension; d += LINE / (int)sizeof(int16_t)) __builtin_prefetch(row + d);
    __builtin_prefetch(row + dimension - 1);
    __builtin_prefetch(from->unit_Q + partner);
}

INLINE void add(float *sum, const Partners *from, int64_t partner, int dimension) {
    const int16_t *row = from->whole_QD + partner * dimension;
    const float unit = from->unit_Q[partner];
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

/* Exact; infinities and what is no number stay so. */
INLINE void widen(const uint16_t *half, float *to, int count) {
    for (int i = 0; i < count; i++) {
        const uint32_t rest = half[i] & 0x7fff;
        const float small = (float)(int32_t)rest * 0x1p-24f; /* the value where the exponent is that of zero */
        uint32_t bits;
        memcpy(&bits, &small, sizeof bits);
        const uint32_t large = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
        bits = (rest < 0x400 ? bits : large) | (uint32_t)(half[i] & 0x8000) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

INLINE unsigned plain_state(void) {
#if defined(__x86_64__)
    const unsigned state = _mm_getcsr();
    _mm_setcsr(0x1f80); /* round to nearest, no flushing of small numbers, whatever the caller's thread has set */
    return state;
#else
    return 0;
#endif
}

INLINE void put_back(unsigned state) {
#if defined(__x86_64__)
    _mm_setcsr(state);
#else
    (void)state;
#endif
}

/* Rows `first` up to `last` in whole numbers of their own unit, the largest being MOST; the nearest, even ones on ties.
   A row of numbers below TINY is zero, and the unit of one with what is no number is none. */
EACH void mvr_round(const float *rows, int64_t first, int64_t last, int dimension, int16_t *whole, float *unit) {
    const unsigned state = plain_state();
    for (int64_t row = first; row < last; row++) {
        const float *from = rows + row * dimension;
        float most = 0, none = 0;
        for (int d = 0; d < dimension; d++) {
            const float size = from[d] < 0 ? -from[d] : from[d];
            most = size > most ? size : most;
            none += from[d] * 0;
        }
        const int zero = most < TINY || none != 0;
        const float inverse = zero ? 0 : MOST / most;
        unit[row] = most < TINY ? none : most / MOST + none;
        for (int d = 0; d < dimension; d++) {
            const float near = zero ? 0 : from[d] * inverse + 0x1.8p23f; /* whole numbers are a unit apart there */
            whole[row * dimension + d] = (int16_t)(int32_t)(near - (zero ? 0 : 0x1.8p23f));
        }
    }
    put_back(state);
}

/* Steps of vectors `row_M[first]` up to `row_M[last]`: moved_MD, and in score_M2 the products <x, A> and <x, B>.
   `space` has room for three vectors of whole lanes, and is zero. */
EACH void mvr_step(int kind, const void *vectors, const int16_t *whole_QD, const float *unit_Q, int dimension,
                   const Labels *labels, const int64_t *row_M, int64_t first, int64_t last, float step_size,
                   float *moved_MD, float *score_M2, float *space) {
    const unsigned state = plain_state();
    const Partners partners = {whole_QD, unit_Q};
    const int padded = (dimension + LANES - 1) / LANES * LANES;
    float *x = space, *sum[2] = {space + padded, space + 2 * padded};
    Walk coming = {labels, row_M, first - 1, last, 0, 0, 1};
    for (int i = 0; i < AHEAD; i++) {
        const int64_t partner = next(&coming);
        if (partner >= 0) ask_for(&partners, partner, dimension);
    }
    for (int64_t m = first; m < last; m++) {
        const int64_t row = row_M[m];
        if (kind == FLOAT16) widen((const uint16_t *)vectors + row * dimension, x, dimension);
        else memcpy(x, (const float *)vectors + row * dimension, dimension * sizeof(float));
        for (int sign = 0; sign < 2; sign++) {
            const Labels *own = labels + sign;
            const int64_t stop = number(own->start, own->wide, row + 1);
            memset(sum[sign], 0, dimension * sizeof(float));
            for (int64_t at = number(own->start, own->wide, row); at < stop; at++) {
                const int64_t partner = next(&coming);
                if (partner >= 0) ask_for(&partners, partner, dimension);
                add(sum[sign], &partners, number(own->index, own->wide, at), dimension);
            }
        }
        const float good = dot(x, sum[0], padded), every = good + dot(x, sum[1], padded);
        score_M2[2 * m] = good, score_M2[2 * m + 1] = every;
        const float from_every = step_size / every, to_good = step_size / good - from_every;
        float *moved = moved_MD + m * dimension;
        for (int d = 0; d < dimension; d++) moved[d] = x[d] + sum[0][d] * to_good - sum[1][d] * from_every;
    }
    put_back(state);
}
#endif

/* A new number with every change of a function's arguments or of a struct, here and in `native_step.py`. */
int mvr_interface(void) { return 2; }
