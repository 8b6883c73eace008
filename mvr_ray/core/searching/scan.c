/* The hot loops of exact search for processors with AVX-512 and VNNI, called by `native.py`, which documents them.
   Those at the end need only AVX2: norms, exact scores, and the best views of passages.

   A tile is ROWS consecutive vectors. Its inner products with a panel of queries stay in registers, as do the maximum
   over each passage's views and its comparison with the cut, so scores never reach memory. A passage may span tiles;
   `best` carries its maximum from one to the next.

   A factor x is high + low + rest, high and low being bfloat16. Coarse scores are the product of the high parts, and
   `native.py` bounds their error. Fine ones are sums of float32; or, where the processor has AMX, of three of the four
   products, and it bounds the fourth and the rests. AMX multiplies 32 rows with 32 queries at a time, coarse or fine;
   without it, vector registers compute coarse products of two dimensions at once.

   Shapes: Q queries, P passages, N vectors, D dimension, K best lower bounds kept for each query. */

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>
#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c"
#define FAST __attribute__((target(AVX512)))
#define SHORT __attribute__((target(AVX512 ",avx512bf16")))
#define TILES __attribute__((target(AVX512 ",avx512bf16,amx-tile,amx-bf16,amx-int8")))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define ROWS 8
#define TILE_ROWS 6 /* of a tile for AVX2, with four queries in the first-level cache up to 800 dimensions */
#define LANES 16
#define BLOCK 32 /* rows of a block for matrix tiles: two tiles of 16 */
#define AHEAD(size) ((size) == 4 ? 3072 : 6144) /* prefetch distance in order, in bytes, into the second cache */
#define TILE 512 /* two-byte values of a matrix tile */
#define SLICE 6 /* times 32 dimensions: both parts of a block's rows fit the first-level cache; twice as long for one */
#define LARGE 0x1p120f /* above, a bfloat16 could be infinite */
#define LARGE_BITS 0x7b800000 /* of LARGE as a float32 */
#define PLAIN_STATE 0x1f80 /* round to nearest, no flushing of small numbers, regardless of the caller */

enum { FLOAT32, FLOAT16, INT8 };

/* Calls a macro with the kind as a constant, or with the number of registers for the queries left in a panel. */
#define BY_KIND(kind, CALL) ((kind) == FLOAT32 ? CALL(FLOAT32) : (kind) == FLOAT16 ? CALL(FLOAT16) : CALL(INT8))
#define BY_WIDTH(left, CALL) ((left) > 2 * LANES ? CALL(3) : (left) > LANES ? CALL(2) : CALL(1))
#define HAS(feature) __builtin_cpu_supports(feature)

INLINE int size_of(int kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

int mvr_supported(void) {
    return HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") && HAS("avx512vnni") && HAS("fma");
}

/* Whether the processor supports the functions for AVX2. */
int mvr_supported_avx2(void) { return HAS("avx2") && HAS("fma") && HAS("f16c"); }

/* Whether vector registers multiply bfloat16. */
int mvr_short(void) { return mvr_supported() && HAS("avx512bf16"); }

/* Whether matrix tiles may be used: the processor has them, and Linux grants this process their state. */
int mvr_tiles(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    unsigned a, b, c, d;
    if (!mvr_supported() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, needed = bf16 | tile | int8;
    if ((d & needed) != needed || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

typedef int32_t Bits __attribute__((vector_size(32)));

/* Eight values in float32. */
AVX2 INLINE __m256 load_eight(const int kind, const char *at) {
    if (kind == FLOAT32) return _mm256_loadu_ps((const float *)at);
    if (kind == FLOAT16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

/* Writes values in float32. */
AVX2 static const float *to_floats(int kind, const char *from, int64_t count, float *to) {
    int64_t d = 0;
    for (; d + 8 <= count; d += 8) _mm256_storeu_ps(to + d, load_eight(kind, from + d * size_of(kind)));
    for (; d < count; d++)
        to[d] = kind == FLOAT16 ? _cvtsh_ss(((const uint16_t *)from)[d]) : ((const float *)from)[d];
    return to;
}

/* Lower bounds and candidates of the queries. `low_QK` holds a min-heap a query. Passages with a 0 in `mask_P` are
   skipped; NULL without a mask. */
typedef struct {
    int32_t num_queries, limit;
    const uint8_t *mask_P;
    const float *error_Q;
    float *low_QK, *cut_Q; /* a score below cut_Q cannot matter; cut_Q is padded to whole panels with +inf */
    int64_t capacity, num_candidates;
    int64_t *query_M, *passage_M;
    float *upper_M;
} Search;

/* Queries as the loops read them. `tiles` are the bfloat16 panels, or codes' own; NULL without AMX.
   `coarse` are panels of high parts, for AMX if `tiles` are set; NULL for fine products. */
typedef struct {
    const void *packed, *tiles, *coarse;
    const int32_t *bias;
    const float *unit_Q;
} Queries;

FAST static float cut(float low, float error) {
    return low - error - (fabsf(low) + error) * 0x1p-21f; /* -inf stays -inf */
}

/* Adds a score above the cut if `a + e` reaches the k-th lower bound, which `a - e` may replace. */
FAST static void add_candidate(Search *s, int query, int64_t passage, float score) {
    if (s->mask_P && !s->mask_P[passage]) return;
    float *heap = s->low_QK + (int64_t)query * s->limit, error = s->error_Q[query];
    if (!(score + error >= heap[0])) return;
    s->query_M[s->num_candidates] = query;
    s->passage_M[s->num_candidates] = passage;
    s->upper_M[s->num_candidates++] = score + error;
    float low = score - error;
    if (!(low > heap[0])) return;
    int at = 0;
    for (int child; (child = 2 * at + 1) < s->limit; at = child) {
        if (child + 1 < s->limit && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= low) break;
        heap[at] = heap[child];
    }
    heap[at] = low;
    s->cut_Q[query] = cut(heap[0], error);
}

FAST static void add_candidates(Search *s, unsigned mask, int first, int64_t passage, __m512 scores) {
    float lanes[LANES];
    _mm512_storeu_ps(lanes, scores);
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        add_candidate(s, first + lane, passage, lanes[lane]);
    }
}

/* Takes the maximum over each passage's rows in a tile for LANES queries, and adds the candidates.
   Bit r of `ends` is set where row r is the last of its passage. */
FAST INLINE void reduce_rows(Search *s, const __m512 *score_R, unsigned ends, int64_t passage, int first, float *best) {
    __m512 most = _mm512_loadu_ps(best);
    UNROLL for (int r = 0; r < ROWS; r++) {
        most = _mm512_max_ps(most, score_R[r]);
        if (ends >> r & 1) {
            unsigned mask = _mm512_cmp_ps_mask(most, _mm512_loadu_ps(s->cut_Q + first), _CMP_GE_OQ);
            if (__builtin_expect(mask, 0)) add_candidates(s, mask, first, passage, most);
            passage++;
            most = _mm512_set1_ps(-INFINITY);
        }
    }
    _mm512_storeu_ps(best, most);
}

FAST INLINE void float_panel(Search *s, const float *tile_RD, const float *panel, int dimension, const int width,
                             unsigned ends, int64_t passage, int first, float *best) {
    __m512 sum[3][ROWS];
    UNROLL for (int w = 0; w < width; w++) UNROLL for (int r = 0; r < ROWS; r++) sum[w][r] = _mm512_setzero_ps();
    for (int d = 0; d < dimension; d++) {
        __m512 query[3];
        UNROLL for (int w = 0; w < width; w++) query[w] = _mm512_loadu_ps(panel + (d * width + w) * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m512 one = _mm512_set1_ps(tile_RD[(int64_t)r * dimension + d]);
            UNROLL for (int w = 0; w < width; w++) sum[w][r] = _mm512_fmadd_ps(one, query[w], sum[w][r]);
        }
    }
    UNROLL for (int w = 0; w < width; w++) reduce_rows(s, sum[w], ends, passage, first + w * LANES, best + w * LANES);
}

/* Panels of 48 queries, the last of 16, 32 or 48: [panel][D][queries of the panel]. */
FAST static void float_tile(Search *s, const float *tile_RD, const float *panels, int dimension, unsigned ends,
                            int64_t passage, float *best_Q) {
    for (int first = 0; first < s->num_queries;) {
        const float *panel = panels + (int64_t)first * dimension;
#define PANEL(width) \
    (float_panel(s, tile_RD, panel, dimension, width, ends, passage, first, best_Q + first), first += width * LANES)
        BY_WIDTH(s->num_queries - first, PANEL);
#undef PANEL
    }
}

/* Integer products of codes, made unsigned by adding 128, with queries of 16 bits in two halves, high and low. Panels
   of 16 queries: [panel][D / 4][high, low][16 queries][4]. `bias` takes the 128 off again: [panel][high, low][16]. */
FAST static void code_tile(Search *s, const uint8_t *tile_RD, int stride, const float *scale_R, const int8_t *panels,
                           const int32_t *bias, const float *unit_Q, unsigned ends, int64_t passage, float *best_Q) {
    for (int first = 0; first < s->num_queries; first += LANES) {
        const int8_t *panel = panels + (int64_t)first * stride * 2;
        __m512i high[ROWS], low[ROWS];
        __m512i no_high = _mm512_loadu_si512(bias + first * 2), no_low = _mm512_loadu_si512(bias + first * 2 + LANES);
        UNROLL for (int r = 0; r < ROWS; r++) high[r] = no_high, low[r] = no_low;
        for (int d = 0; d < stride; d += 4) {
            __m512i query_high = _mm512_loadu_si512(panel + (int64_t)d * 2 * LANES);
            __m512i query_low = _mm512_loadu_si512(panel + (int64_t)d * 2 * LANES + 4 * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                int32_t four;
                memcpy(&four, tile_RD + r * stride + d, 4);
                __m512i one = _mm512_set1_epi32(four);
                high[r] = _mm512_dpbusd_epi32(high[r], one, query_high);
                low[r] = _mm512_dpbusd_epi32(low[r], one, query_low);
            }
        }
        __m512 score_R[ROWS], unit = _mm512_loadu_ps(unit_Q + first);
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r]), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low[r]));
            score_R[r] = _mm512_mul_ps(sum, _mm512_mul_ps(unit, _mm512_set1_ps(scale_R[r])));
        }
        reduce_rows(s, score_R, ends, passage, first, best_Q + first);
    }
}

FAST INLINE __m512 load_row(int kind, const char *rows, int64_t at, __mmask16 rest) {
    if (kind == FLOAT32) return _mm512_maskz_loadu_ps(rest, (const float *)rows + at);
    if (kind == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(rest, rows + at)));
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, (const uint16_t *)rows + at));
}

/* Dimensions from 32 `first` on of rows, `chunks` times 32, as two bfloat16 parts, or as the high one if `low` is NULL:
   row r from `r / 16 * apart + r % 16 * stride` on, the next 32 dimensions a `step` further. False if one is large.
   `prefetch_next`: also prefetch the rows of the next block. */
SHORT INLINE int split(const int kind, const int both, const int prefetch_next, const char *rows, int count,
                       int dimension, int first, int chunks, int64_t apart, int64_t stride, int64_t step,
                       uint16_t *high, uint16_t *low) {
    const int size = size_of(kind), whole = dimension / 32 - first;
    __m512 most = _mm512_setzero_ps();
    for (int r = 0; r < count; r++) {
        const int64_t start = (int64_t)r * dimension + first * 32;
        int64_t to = r / 16 * apart + r % 16 * stride;
        for (int c = 0; c < chunks; c++, to += step) {
            const uint32_t rest = c < whole ? ~0u : (1u << dimension % 32) - 1;
            const __m512 a = load_row(kind, rows, start + c * 32, (__mmask16)rest);
            const __m512 b = load_row(kind, rows, start + c * 32 + LANES, (__mmask16)(rest >> 16));
            const char *next = rows + (start + c * 32 + (int64_t)BLOCK * dimension) * size;
            if (prefetch_next) _mm_prefetch(next, _MM_HINT_T1);
            if (prefetch_next && kind == FLOAT32) _mm_prefetch(next + 64, _MM_HINT_T1);
            most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
            const __m512i upper = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            _mm512_store_si512(high + to, upper);
            if (!both) continue;
            const __m512i rounded_a = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(upper)), 16);
            const __m512i rounded_b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(upper, 1)), 16);
            const __m512 rest_a = _mm512_sub_ps(a, _mm512_castsi512_ps(rounded_a));
            const __m512 rest_b = _mm512_sub_ps(b, _mm512_castsi512_ps(rounded_b));
            _mm512_store_si512(low + to, (__m512i)_mm512_cvtne2ps_pbh(rest_b, rest_a));
        }
    }
    return _mm512_reduce_max_ps(most) < LARGE;
}

/* In matrix tiles: [two tiles of 16 rows][chunk][16 rows][32]. */
SHORT static int split_tiles(int kind, const char *rows, int count, int dimension, int first, int chunks,
                             uint16_t *high, uint16_t *low) {
    const int64_t apart = (int64_t)chunks * TILE;
#define SPLIT(kind, both) split(kind, both, 1, rows, count, dimension, first, chunks, apart, 32, TILE, high, low)
    if (low) return kind == FLOAT32 ? SPLIT(FLOAT32, 1) : SPLIT(FLOAT16, 1);
    return kind == FLOAT32 ? SPLIT(FLOAT32, 0) : SPLIT(FLOAT16, 0);
#undef SPLIT
}

#define ZERO_TILES { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }
#define FOR_SCORES(ACCESS) { \
    ACCESS(0, score, 64); ACCESS(2, score + 256, 64); \
    if (two) { ACCESS(1, score + 512, 64); ACCESS(3, score + 768, 64); } }
#define LOAD_ROWS(from) { _tile_loadd(4, (from) + upper, 64); _tile_loadd(5, (from) + lower, 64); }
#define MULTIPLY_FIRST { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(2, 5, 6); }
#define MULTIPLY_SECOND { _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(3, 5, 7); }

/* Adds to the scores of a block with one or two panels of 16 queries, [panel][32 rows][16 queries], the products of a
   slice of dimensions. Panels: [D / 32][high, low][16 pairs of D][16 queries][2], `apart` from each other; coarse ones
   have no low part, nor have the rows. */
TILES INLINE void tile_products(const uint16_t *high, const uint16_t *low, const uint16_t *panel, int64_t apart,
                                int chunks, const int fine, const int two, int accumulate, float *score) {
    __asm__ volatile("" ::: "memory"); /* the compiler does not see that tiles are loaded from memory */
    if (accumulate) FOR_SCORES(_tile_loadd)
    else ZERO_TILES
    for (int c = 0; c < chunks; c++) {
        const int64_t upper = (int64_t)c * TILE, lower = (int64_t)(chunks + c) * TILE;
        const uint16_t *query = panel + (int64_t)c * (1 + fine) * TILE, *next = query + apart;
        _tile_loadd(6, query, 64);
        if (two) _tile_loadd(7, next, 64);
        if (fine) {
            LOAD_ROWS(low);
            MULTIPLY_FIRST;
            if (two) MULTIPLY_SECOND;
        }
        LOAD_ROWS(high);
        MULTIPLY_FIRST;
        if (fine) _tile_loadd(6, query + TILE, 64);
        if (two) MULTIPLY_SECOND;
        if (fine && two) _tile_loadd(7, next + TILE, 64);
        if (fine) MULTIPLY_FIRST;
        if (fine && two) MULTIPLY_SECOND;
    }
    FOR_SCORES(_tile_stored)
}

/* `score` as above, of one panel. */
FAST static void reduce_block(Search *s, const float *score, unsigned ends, int64_t passage, int first, float *best) {
    for (int r = 0; r < BLOCK; r += ROWS, ends >>= ROWS) {
        __m512 score_R[ROWS];
        UNROLL for (int i = 0; i < ROWS; i++) score_R[i] = _mm512_loadu_ps(score + (r + i) * LANES);
        reduce_rows(s, score_R, ends & 0xff, passage, first, best);
        passage += __builtin_popcount(ends & 0xff);
    }
}

/* False, without candidates, if a row is too large for bfloat16. Coarse panels need the high parts of the rows,
   whose slices may then be twice as long: `low` must follow `high`. */
TILES INLINE int float_block(Search *s, int kind, const char *rows, int count, int dimension, const uint16_t *panels,
                             const int fine, uint16_t *high, uint16_t *low, float *score, unsigned ends,
                             int64_t passage, float *best_Q) {
    const int chunks = (dimension + 31) / 32, slice = fine ? SLICE : 2 * SLICE;
    const int64_t apart = (int64_t)chunks * (1 + fine) * TILE;
    for (int from = 0; from < chunks; from += slice) {
        const int some = chunks - from < slice ? chunks - from : slice;
        if (!split_tiles(kind, rows, count, dimension, from, some, high, fine ? low : NULL)) return 0;
        for (int first = 0; first < s->num_queries; first += 2 * LANES) {
            const uint16_t *panel = panels + first / LANES * apart + (int64_t)from * (1 + fine) * TILE;
            float *own = score + (int64_t)first * BLOCK;
            if (s->num_queries - first > LANES) tile_products(high, low, panel, apart, some, fine, 1, from, own);
            else tile_products(high, low, panel, apart, some, fine, 0, from, own);
        }
    }
    for (int first = 0; first < s->num_queries; first += LANES)
        reduce_block(s, score + (int64_t)first * BLOCK, ends, passage, first, best_Q + first);
    return 1;
}

TILES static int coarse_or_fine_block(Search *s, int kind, const char *rows, int count, int dimension,
                                      const Queries *queries, uint16_t *high, uint16_t *low, float *score,
                                      unsigned ends, int64_t passage, float *best_Q) {
#define BLOCK_OF(panels, fine) \
    float_block(s, kind, rows, count, dimension, panels, fine, high, low, score, ends, passage, best_Q)
    return queries->coarse ? BLOCK_OF(queries->coarse, 0) : BLOCK_OF(queries->tiles, 1);
#undef BLOCK_OF
}

/* Prefetches memory from `next` on, `step` bytes for each dimension, between the products. */
SHORT INLINE void short_panel(Search *s, const uint16_t *tile_RD, const float *scale_R, const uint16_t *panel,
                              int width, const int wide, const char *next, int step, unsigned ends, int64_t passage,
                              int first, float *best) {
    __m512 sum[3][ROWS];
    UNROLL for (int w = 0; w < wide; w++) UNROLL for (int r = 0; r < ROWS; r++) sum[w][r] = _mm512_setzero_ps();
    for (int d = 0; d < width; d += 2) {
        __m512i query[3];
        UNROLL for (int w = 0; w < wide; w++) query[w] = _mm512_loadu_si512(panel + (d * wide + 2 * w) * LANES);
        _mm_prefetch(next + (int64_t)d * step, _MM_HINT_T1);
        UNROLL for (int r = 0; r < ROWS; r++) {
            int32_t two;
            memcpy(&two, tile_RD + (int64_t)r * width + d, 4);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(two);
            UNROLL for (int w = 0; w < wide; w++) sum[w][r] = _mm512_dpbf16_ps(sum[w][r], one, (__m512bh)query[w]);
        }
    }
    UNROLL for (int w = 0; w < wide; w++) {
        UNROLL for (int r = 0; r < ROWS && scale_R; r++)
            sum[w][r] = _mm512_mul_ps(sum[w][r], _mm512_set1_ps(scale_R[r]));
        reduce_rows(s, sum[w], ends, passage, first + w * LANES, best + w * LANES);
    }
}

/* The same for coarse products without matrix tiles; codes are integers that bfloat16 represents exactly. Panels of 48
   queries, the last of 16, 32 or 48: [panel][D / 2][queries of the panel][2], D up to a multiple of 32. `high` holds a
   block of such rows. */
SHORT static int short_block(Search *s, int kind, const char *rows, const float *scale_N, int count, int dimension,
                             const uint16_t *panels, uint16_t *high, unsigned ends, int64_t passage, float *best_Q) {
    const int chunks = (dimension + 31) / 32, width = chunks * 32, size = size_of(kind);
    const int64_t apart = (int64_t)16 * width;
#define SPLIT(kind) split(kind, 0, 0, rows, count, dimension, 0, chunks, apart, width, 32, high, NULL)
    if (!BY_KIND(kind, SPLIT)) return 0;
#undef SPLIT
    for (int first = 0; first < s->num_queries; first += 3 * LANES) {
        const uint16_t *panel = panels + (int64_t)first * width;
        float *best = best_Q + first;
        int64_t at = passage;
        for (int r = 0; r < count; r += ROWS) {
            const unsigned own = ends >> r & 0xff;
            const uint16_t *tile_RD = high + (int64_t)r * width;
            const float *scale_R = kind == INT8 ? scale_N + r : NULL;
            const char *next = first ? (const char *)tile_RD : rows + (int64_t)(BLOCK + r) * dimension * size;
            const int step = first ? 0 : ROWS * size;
#define PANEL(wide) short_panel(s, tile_RD, scale_R, panel, width, wide, next, step, own, at, first, best)
            BY_WIDTH(s->num_queries - first, PANEL);
#undef PANEL
            at += __builtin_popcount(own);
        }
    }
    return 1;
}

/* The same for codes: products of signed bytes are exact, in the panels of `code_tile`. */
TILES static void code_block(Search *s, const int8_t *rows, int width, const float *scale_R, const int8_t *panels,
                             const float *unit_Q, float *score, unsigned ends, int64_t passage, float *best_Q) {
    int32_t sum[4 * 256];
    for (int first = 0; first < s->num_queries; first += LANES) {
        const int8_t *panel = panels + (int64_t)first * width * 2;
        __asm__ volatile("" ::: "memory");
        ZERO_TILES;
        for (int d = 0; d < width; d += 64) {
            const int8_t *query = panel + (int64_t)d * 2 * LANES;
            _tile_loadd(4, rows + d, width);
            _tile_loadd(5, rows + (int64_t)16 * width + d, width);
            _tile_loadd(6, query, 128);
            _tile_loadd(7, query + 64, 128);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, sum, 64);
        _tile_stored(1, sum + 256, 64);
        _tile_stored(2, sum + 512, 64);
        _tile_stored(3, sum + 768, 64);
        const __m512 unit = _mm512_loadu_ps(unit_Q + first);
        for (int r = 0; r < BLOCK; r++) {
            const int32_t *from = sum + r / 16 * 512 + r % 16 * LANES; /* high; low is a tile further */
            const __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(from));
            const __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(from + 256));
            const __m512 both = _mm512_fmadd_ps(high, _mm512_set1_ps(256), low);
            _mm512_storeu_ps(score + r * LANES, _mm512_mul_ps(both, _mm512_mul_ps(unit, _mm512_set1_ps(scale_R[r]))));
        }
        reduce_block(s, score, ends, passage, first, best_Q + first);
    }
}

/* Palette 1, and for each of eight tiles 64 bytes a row, and 16 rows. A constant, since the compiler assumes that only
   its first bytes are read. */
static const uint16_t TILE_SHAPES[32] = {1, [8 ... 15] = 64, [24 ... 27] = 16 << 8 | 16};

TILES static void open_tiles(void) { _tile_loadconfig(TILE_SHAPES); }
TILES static void close_tiles(void) { _tile_release(); }

/* The sum over lanes of each of ROWS registers, in registers. */
FAST INLINE __m256 lane_sums(const __m512 *sum) {
    __m256 half[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
        half[r] = _mm256_add_ps(_mm512_castps512_ps256(sum[r]), _mm512_extractf32x8_ps(sum[r], 1));
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(half[4], half[5]), _mm256_hadd_ps(half[6], half[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

/* One query: rows are read along D, so that each byte of the vectors is read once. */
FAST INLINE __m256 float_rows(const char *tile, const int half, const float *query, int dimension, int ahead) {
    const int64_t size = half ? 2 : 4, stride = dimension * size;
    __m512 sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
    for (int d = 0; d < dimension; d += LANES) {
        const __mmask16 rest = dimension - d >= LANES ? 0xffff : (__mmask16)((1u << (dimension - d)) - 1);
        const __m512 values = _mm512_maskz_loadu_ps(rest, query + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const char *row = tile + r * stride;
            if (!half || d & LANES) _mm_prefetch(row + d * size + ahead, _MM_HINT_T1);
            sum[r] = _mm512_fmadd_ps(load_row(half, row, d, rest), values, sum[r]);
        }
    }
    return lane_sums(sum);
}

/* One query for rows read one after the other: each begins `skew` numbers after an aligned address, and so does the
   query, between zeros. Loads are aligned, as one across two cache lines costs two. */
typedef struct {
    int skew;
    const float *query;
    const int8_t *high, *low;
    __m512i bias_high, bias_low;
} AlignedQuery;

/* Adds the products of 64 codes, made unsigned, with both halves of a query, 64-byte aligned. */
FAST INLINE void add_codes(__m512i codes, const int8_t *high, const int8_t *low, __m512i *large, __m512i *small) {
    codes = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    *large = _mm512_dpbusd_epi32(*large, codes, _mm512_load_si512(high));
    *small = _mm512_dpbusd_epi32(*small, codes, _mm512_load_si512(low));
}

/* False where rows differ in alignment to cache lines, or numbers are not aligned to their size. */
FAST static int align_query(int kind, const char *rows, const Queries *queries, int dimension, int width, char *space,
                            AlignedQuery *aligned) {
    const int size = size_of(kind), lanes = kind == INT8 ? 64 : LANES;
    if (dimension < 64 || dimension % lanes || (uintptr_t)rows % size) return 0;
    aligned->skew = (int)((uintptr_t)rows % (lanes * size)) / size;
    if (kind != INT8) {
        aligned->query = memset(space, 0, (dimension + LANES) * sizeof(float));
        memcpy((float *)space + aligned->skew, (const float *)queries->packed + LANES, dimension * sizeof(float));
        return 1;
    }
    const int8_t *halves = queries->packed;
    aligned->high = memset(space, 0, 2 * (dimension + 64));
    aligned->low = aligned->high + dimension + 64;
    memcpy(space + aligned->skew, halves, dimension);
    memcpy(space + dimension + 64 + aligned->skew, halves + width, dimension);
    aligned->bias_high = aligned->bias_low = _mm512_setzero_si512();
    const __m512i zero = _mm512_setzero_si512();
    for (int d = 0; d < dimension + 64; d += 64)
        add_codes(zero, aligned->high + d, aligned->low + d, &aligned->bias_high, &aligned->bias_low);
    aligned->bias_high = _mm512_sub_epi32(_mm512_setzero_si512(), aligned->bias_high);
    aligned->bias_low = _mm512_sub_epi32(_mm512_setzero_si512(), aligned->bias_low);
    return 1;
}

/* Rows one after the other with four sums each, for AMD; numbers before and after a row are masked. */
FAST INLINE __m256 float_rows_by_line(const char *part, const int half, const AlignedQuery *aligned, int dimension) {
    const int64_t size = half ? 2 : 4, step = LANES * size, stride = dimension * size;
    const __mmask16 first = (__mmask16)(0xffffu << aligned->skew), last = (__mmask16)((1u << aligned->skew) - 1);
    const char *row = part - aligned->skew * size;
    __m512 sum[ROWS];
    for (int r = 0; r < ROWS; r++, row += stride) {
        const float *query = aligned->query;
        const char *at = row, *end = row + stride;
        __m512 one[4];
        UNROLL for (int i = 0; i < 4; i++) {
            if (!half || i & 1) _mm_prefetch(at + i * step + AHEAD(size), _MM_HINT_T1);
            const __m512 lanes = load_row(half, at, i * LANES, i ? 0xffff : first);
            one[i] = _mm512_mul_ps(lanes, _mm512_load_ps(query + i * LANES));
        }
        for (at += 4 * step, query += 4 * LANES; at + 4 * step <= end; at += 4 * step, query += 4 * LANES) {
            UNROLL for (int i = 0; i < 4; i++) {
                if (!half || i & 1) _mm_prefetch(at + i * step + AHEAD(size), _MM_HINT_T1);
                const __m512 lanes = load_row(half, at, i * LANES, 0xffff);
                one[i] = _mm512_fmadd_ps(lanes, _mm512_load_ps(query + i * LANES), one[i]);
            }
        }
        for (; at < end; at += step, query += LANES) {
            _mm_prefetch(at + AHEAD(size), _MM_HINT_T1);
            one[1] = _mm512_fmadd_ps(load_row(half, at, 0, 0xffff), _mm512_load_ps(query), one[1]);
        }
        if (last) one[2] = _mm512_fmadd_ps(load_row(half, at, 0, last), _mm512_load_ps(query), one[2]);
        sum[r] = _mm512_add_ps(_mm512_add_ps(one[0], one[1]), _mm512_add_ps(one[2], one[3]));
    }
    return lane_sums(sum);
}

/* `high`, `low`: the query, padded with zeros to 64; `bias`: for each 4 bytes of 64, of both halves. */
FAST INLINE __m256 code_rows(const int8_t *tile, const float *scale_R, const int8_t *high, const int8_t *low,
                             const int32_t *bias, float unit, int dimension, int ahead) {
    const __m512i flip = _mm512_set1_epi8(-128);
    __m512i large[ROWS], small[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
        large[r] = _mm512_loadu_si512(bias), small[r] = _mm512_loadu_si512(bias + LANES);
    for (int d = 0; d < dimension; d += 64) {
        const __mmask64 rest = dimension - d >= 64 ? ~0ull : (1ull << (dimension - d)) - 1;
        const __m512i part_high = _mm512_loadu_si512(high + d), part_low = _mm512_loadu_si512(low + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const int8_t *from = tile + (int64_t)r * dimension + d;
            const __m512i row = _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, from), flip);
            _mm_prefetch((const char *)from + ahead, _MM_HINT_T1);
            large[r] = _mm512_dpbusd_epi32(large[r], row, part_high);
            small[r] = _mm512_dpbusd_epi32(small[r], row, part_low);
        }
    }
    __m512 sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
        sum[r] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(large[r], 8), small[r]));
    return _mm256_mul_ps(lane_sums(sum), _mm256_mul_ps(_mm256_set1_ps(unit), _mm256_loadu_ps(scale_R)));
}

/* Rows one after the other; numbers before and after a row are multiplied by zeros. */
FAST INLINE __m256 code_rows_by_line(const char *part, const float *scale_R, const AlignedQuery *aligned, float unit,
                                     int dimension) {
    const __mmask64 first = ~0ull << aligned->skew, last = (1ull << aligned->skew) - 1;
    const char *row = part - aligned->skew;
    __m512 sum[ROWS];
    for (int r = 0; r < ROWS; r++, row += dimension) {
        const char *at = row, *end = row + dimension;
        const int8_t *high = aligned->high, *low = aligned->low;
        __m512i large = aligned->bias_high, small = aligned->bias_low;
        _mm_prefetch(at + AHEAD(1), _MM_HINT_T1);
        add_codes(_mm512_maskz_loadu_epi8(first, at), high, low, &large, &small);
        for (at += 64, high += 64, low += 64; at < end; at += 64, high += 64, low += 64) {
            _mm_prefetch(at + AHEAD(1), _MM_HINT_T1);
            add_codes(_mm512_load_si512(at), high, low, &large, &small);
        }
        if (last) add_codes(_mm512_maskz_loadu_epi8(last, at), high, low, &large, &small);
        sum[r] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(large, 8), small));
    }
    return _mm256_mul_ps(lane_sums(sum), _mm256_mul_ps(_mm256_set1_ps(unit), _mm256_loadu_ps(scale_R)));
}

/* Scores of the tile's rows with the one query; `aligned` is NULL unless they are read one after the other. */
FAST INLINE __m256 one_query(int kind, const char *part, const float *scale_R, const Queries *queries,
                             const AlignedQuery *aligned, int dimension, int width, int ahead) {
    const int8_t *halves = queries->packed, *codes = (const int8_t *)part;
    const float *query = (const float *)queries->packed + LANES;
    if (aligned && kind == FLOAT32) return float_rows_by_line(part, 0, aligned, dimension);
    if (aligned && kind == FLOAT16) return float_rows_by_line(part, 1, aligned, dimension);
    if (aligned) return code_rows_by_line(part, scale_R, aligned, queries->unit_Q[0], dimension);
    if (kind == FLOAT32) return float_rows(part, 0, query, dimension, ahead);
    if (kind == FLOAT16) return float_rows(part, 1, query, dimension, ahead);
    return code_rows(codes, scale_R, halves, halves + width, queries->bias, queries->unit_Q[0], dimension, ahead);
}

/* The same for one query. Where neither a row nor the open passage's maximum reaches the cut, no passage does, and only
   the maximum of the next open passage is computed. */
FAST INLINE void reduce_one(Search *s, __m256 score, int rows, unsigned ends, int64_t passage, float *best) {
    const __m256 low = _mm256_set1_ps(-INFINITY);
    score = _mm256_mask_mov_ps(low, (__mmask8)((1u << rows) - 1), score);
    if (!_mm256_cmp_ps_mask(score, _mm256_set1_ps(s->cut_Q[0]), _CMP_GE_OQ) && !(*best >= s->cut_Q[0])) {
        const __mmask8 after = ends ? (__mmask8)(0xfeu << (31 - __builtin_clz(ends))) : 0xff;
        if (!after) { *best = -INFINITY; return; }
        __m256 most = _mm256_mask_mov_ps(low, after, score);
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        four = _mm_max_ss(four, _mm_movehdup_ps(four));
        const float open = _mm_cvtss_f32(four);
        *best = !ends && *best > open ? *best : open;
        return;
    }
    float most = *best, score_R[ROWS];
    _mm256_storeu_ps(score_R, score);
    for (int r = 0; r < rows; r++) {
        most = score_R[r] > most ? score_R[r] : most;
        if (ends >> r & 1) {
            if (__builtin_expect(most >= s->cut_Q[0], 0)) add_candidate(s, 0, passage, most);
            passage++;
            most = -INFINITY;
        }
    }
    *best = most;
}

/* Scans passages `first` to `passages` of a step, up to the capacity; returns the next passage to scan.
   `rows` are the step's vectors, [N, D], or codes with their scales. `space` holds a maximum and a block of
   scores a query, two blocks of rows in float32 (D up to a multiple of 64), and the slices of a block. */
FAST int64_t mvr_scan(int kind, const void *rows, const float *scale_N, const int64_t *count_P, int64_t first,
                      int64_t passages, int dimension, const Queries *queries, int ahead, Search *s, void *space) {
    const int size = size_of(kind), width = (dimension + 63) / 64 * 64;
    const int single = s->num_queries == 1 && (kind != INT8 || dimension <= 8192); /* sums of codes may overflow */
    const int padded = (s->num_queries + LANES - 1) / LANES * LANES;
    const int use_tiles = !single && queries->tiles, use_bf16 = !single && !use_tiles && queries->coarse;
    const int block = use_tiles || use_bf16 ? BLOCK : ROWS;
    float *best_Q = (float *)(((uintptr_t)space + 63) & ~(uintptr_t)63);
    float *wide = best_Q + padded, *rest = wide + (int64_t)BLOCK * width, *score = rest + (int64_t)BLOCK * width;
    uint16_t *high = (uint16_t *)(score + (int64_t)BLOCK * padded), *low = high + BLOCK * SLICE * 32;
    AlignedQuery buffer, *aligned = NULL;
    if (single && __builtin_cpu_is("amd") /* it reads one stream faster than eight (`benchmarks/notes.md`) */
        && align_query(kind, rows, queries, dimension, width, (char *)wide, &buffer))
        aligned = &buffer;
    const unsigned state = _mm_getcsr();
    _mm_setcsr(PLAIN_STATE);
    if (use_tiles) open_tiles();
    int64_t total = 0, at = 0, passage = first;
    for (int64_t p = 0; p < passages; p++) *(p < first ? &at : &total) += count_P[p];
    total += at;
    for (int q = 0; q < padded; q++) best_Q[q] = -INFINITY;
    for (int q = 0; q < s->num_queries; q++) s->cut_Q[q] = cut(s->low_QK[(int64_t)q * s->limit], s->error_Q[q]);
    for (int64_t left = passage < passages ? count_P[passage] : 0; at < total; at += block) {
        if (s->capacity - s->num_candidates < (int64_t)block * s->num_queries) break;
        const int here = total - at < block ? (int)(total - at) : block;
        int64_t before = passage;
        unsigned ends = 0;
        for (int64_t stop = left;; stop += count_P[passage]) {
            left = stop - here;
            if (left > 0) break;
            ends |= 1u << (stop - 1);
            if (++passage == passages) break;
        }
        const char *part = (const char *)rows + at * dimension * size;
        float some[BLOCK] = {0};
        const float *scale_R = kind == INT8 ? scale_N + at : some;
        if (kind == INT8 && here < block) scale_R = memcpy(some, scale_R, here * sizeof(float));
        if (here < block)
            part = memcpy((char *)rest + (aligned ? aligned->skew * size : 0), part, (size_t)here * dimension * size);
        if (single) {
            const __m256 score_R = one_query(kind, part, scale_R, queries, aligned, dimension, width, ahead);
            reduce_one(s, score_R, here, ends, before, best_Q);
            continue;
        }
        for (int line = 0; line < here * dimension * size && kind == INT8; line += 64)
            _mm_prefetch(part + ahead + line, _MM_HINT_T1);
        if (use_tiles && kind == INT8) {
            const char *codes = dimension == width && here == block ? part : (const char *)wide;
            for (int r = 0; r < here && codes != part; r++)
                memcpy((char *)wide + r * width, part + r * dimension, dimension);
            code_block(s, (const int8_t *)codes, width, scale_R, queries->tiles, queries->unit_Q, score, ends, before,
                       best_Q);
            continue;
        }
        if (use_tiles && kind != INT8 &&
            coarse_or_fine_block(s, kind, part, here, dimension, queries, high, low, score, ends, before, best_Q))
            continue;
        if (use_bf16 &&
            short_block(s, kind, part, scale_R, here, dimension, queries->coarse, (uint16_t *)wide, ends, before,
                        best_Q))
            continue;
        for (int r = 0; r < here; r += ROWS, ends >>= ROWS) {
            const char *from = part + (int64_t)r * dimension * size;
            if (kind == INT8) {
                uint8_t *codes = (uint8_t *)wide;
                for (int i = 0; i < ROWS; i++)
                    for (int64_t d = 0; d < dimension; d++) codes[i * width + d] = from[i * dimension + d] ^ 0x80;
                code_tile(s, codes, width, scale_R, queries->packed, queries->bias, queries->unit_Q, ends & 0xff,
                          before, best_Q);
            } else {
                const float *tile_RD = (const float *)from;
                if (kind == FLOAT16) tile_RD = to_floats(kind, from, ROWS * dimension, wide);
                float_tile(s, tile_RD, queries->packed, dimension, ends & 0xff, before, best_Q);
            }
            before += __builtin_popcount(ends & 0xff);
        }
    }
    if (use_tiles) close_tiles();
    _mm_setcsr(state);
    return passage;
}

/* The sum of 32 values. */
AVX2 INLINE float sum_of(const __m256 *part) {
    const __m256 all = part[0] + part[1] + (part[2] + part[3]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

/* The inner product of a row with a query, if there is one, and in `square`, if it is given, the sum of the row's
   squares, or of those of its rounding errors in bfloat16 (`errors`): infinite if one is NaN or its value large. */
AVX2 INLINE float row_product(const int kind, const char *row, const float *query, int dimension, const int errors,
                              float *square) {
    char last[32 * sizeof(float)];
    float query_last[32];
    __m256 sum[4] = {0}, squares[4] = {0};
    Bits large = {0};
    for (int d = 0, left; (left = dimension - d) > 0; d += 32, row += 32 * size_of(kind)) {
        const float *part = query ? query + d : query_last;
        if (left < 32) row = memcpy(memset(last, 0, sizeof last), row, left * size_of(kind));
        if (left < 32 && query) part = memcpy(memset(query_last, 0, sizeof query_last), part, left * sizeof(float));
        UNROLL for (int i = 0; i < 4; i++) {
            __m256 eight = load_eight(kind, row + 8 * i * size_of(kind));
            if (query) sum[i] = _mm256_fmadd_ps(eight, _mm256_loadu_ps(part + 8 * i), sum[i]);
            if (errors) {
                const Bits bits = (Bits)eight, even = bits + 0x7fff + (bits >> 16 & 1);
                eight -= (__m256)(even & ~0xffff);
                large |= (bits & 0x7fffffff) >= LARGE_BITS;
            }
            if (square) squares[i] = _mm256_fmadd_ps(eight, eight, squares[i]);
        }
    }
    for (int i = 1; i < 8 && errors; i++) large[0] |= large[i];
    if (square) *square = large[0] ? INFINITY : sum_of(squares);
    return sum_of(sum);
}

AVX2 INLINE float product_of(int kind, const char *row, const float *query, int dimension, float *square) {
    return kind == FLOAT32 ? row_product(FLOAT32, row, query, dimension, 0, square)
                           : row_product(FLOAT16, row, query, dimension, 0, square);
}

/* The largest norm of the vectors, or of their rounding errors, in float32; NaN if one is NaN. */
AVX2 float mvr_max_norm(int kind, int errors, const void *rows, const float *scale_N, int64_t count, int dimension) {
    float most = 0, square;
    for (int64_t n = 0; n < count; n++) {
        const char *row = (const char *)rows + n * dimension * size_of(kind);
#define SQUARE(kind) row_product(kind, row, NULL, dimension, (kind) != INT8 && errors, &square)
        BY_KIND(kind, SQUARE);
#undef SQUARE
        const float norm = sqrtf(square) * (kind == INT8 ? scale_N[n] : 1);
        if (norm != norm) return norm;
        most = norm > most ? norm : most;
    }
    return most;
}

/* The inner product of a row of codes with a query in sixteen bits, whose dimension is a multiple of sixteen; 32 bits
   hold the sum of a lane. */
AVX2 INLINE int64_t code_product(const char *row, const int16_t *query, int dimension) {
    Bits lanes = {0};
    UNROLL for (int d = 0; d < dimension; d += 16) {
        const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row + d)));
        lanes += (Bits)_mm256_madd_epi16(codes, _mm256_loadu_si256((const __m256i *)(query + d)));
    }
    int64_t sum = 0;
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}

AVX2 INLINE void to_shorts(const char *codes, int64_t count, int16_t *to) {
    for (int64_t d = 0; d < count; d++) to[d] = (int8_t)codes[d];
}

/* The rows that are multiplied at once with four queries: more would need more than sixteen registers. */
INLINE int rows_at_once(int kind) { return kind == INT8 ? 2 : 3; }

/* Their products, [rows][4], all `bytes` long: of 16-bit integers for codes, whose sums have 32 bits, else of float32.
   With `fetch`, rows `next` are asked for on the way. */
AVX2 INLINE void some_rows(const int kind, const int fetch, const char *const *row, const char *query, int64_t bytes,
                           const char *const *next, __m128 *product) {
    const int rows = rows_at_once(kind);
    __m256 sum[3][4] = {};
    for (int64_t at = 0; at < bytes; at += 32) {
        const int64_t stored = at / (kind == INT8 ? 2 : 4) * size_of(kind);
        __m256 part[3];
        UNROLL for (int r = 0; r < rows; r++) {
            part[r] = _mm256_loadu_ps((const float *)(row[r] + at));
            if (fetch && stored % 64 == 0) _mm_prefetch(next[r] + stored, _MM_HINT_T1);
        }
        UNROLL for (int q = 0; q < 4; q++) {
            const __m256 values = _mm256_loadu_ps((const float *)(query + q * bytes + at));
            UNROLL for (int r = 0; r < rows; r++)
                if (kind != INT8) sum[r][q] = _mm256_fmadd_ps(part[r], values, sum[r][q]);
                else sum[r][q] = (__m256)((Bits)sum[r][q] + (Bits)_mm256_madd_epi16((__m256i)part[r], (__m256i)values));
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int q = 0; q < 4 && kind == INT8; q++) sum[r][q] = _mm256_cvtepi32_ps((__m256i)sum[r][q]);
        const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(sum[r][0], sum[r][1]), _mm256_hadd_ps(sum[r][2], sum[r][3]));
        product[r] = _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
    }
}

/* Raises `best_PQ` to the inner products with the `count_P` rows from `first_P` on of each passage. Queries are
   float32, or for codes 16-bit integers with a unit each. One is not padded, and for codes has a multiple of sixteen
   dimensions. Several are a multiple of four, padded with zeros to `bytes`, a multiple of 32; `space` holds TILE_ROWS
   such rows, with zeros where they are padded. */
AVX2 void mvr_best_views(int kind, const char *rows, const float *scale_N, const int64_t *first_P,
                         const int64_t *count_P, int64_t passages, int dimension, const void *queries_QD,
                         const float *unit_Q, int queries, int64_t bytes, char *space, float *best_PQ) {
    const int64_t stride = (int64_t)dimension * size_of(kind);
    for (int64_t p = 0; p < passages && queries == 1; p++) {
        const char *row = rows + first_P[p] * stride, *next = rows + first_P[p + 1 < passages ? p + 1 : p] * stride;
        const int ahead = kind != FLOAT32 || next != row + count_P[p] * stride; /* or the processor does it better */
        for (int64_t v = 0; v < count_P[p]; v++, row += stride, next += stride) {
            for (int64_t at = 0; at < stride && ahead; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
            const float score = kind != INT8 ? product_of(kind, row, queries_QD, dimension, NULL)
                : (float)((double)scale_N[first_P[p] + v] * *unit_Q * code_product(row, queries_QD, dimension));
            best_PQ[p] = score > best_PQ[p] ? score : best_PQ[p];
        }
    }
    const char *row_T[TILE_ROWS], *next_T[TILE_ROWS];
    float scale_T[TILE_ROWS];
    int64_t passage_T[TILE_ROWS];
    for (int64_t p = 0, v = 0, done = !passages; !done && queries > 1;) {
        for (int t = 0; t < TILE_ROWS; t++) { /* after the last row it is repeated, which changes no maximum */
            const char *row = rows + (first_P[p] + v) * stride, *next = row + TILE_ROWS * stride;
            char *to = space + t * bytes;
            row_T[t] = kind == FLOAT32 && bytes == stride ? row : to;
            next_T[t] = next;
            if (kind == INT8) scale_T[t] = scale_N[first_P[p] + v], to_shorts(row, dimension, (int16_t *)to);
            else if (row_T[t] == to) to_floats(kind, row, dimension, (float *)to);
            passage_T[t] = p;
            if (v + 1 < count_P[p]) v++;
            else if (p + 1 < passages) p++, v = 0;
            else done = 1;
        }
        for (int q = 0; q < queries; q += 4) {
            __m128 product[3];
            for (int t = 0; t < TILE_ROWS; t++) {
#define FETCH(kind) some_rows(kind, 1, row_T + t, (const char *)queries_QD, bytes, next_T + t, product)
#define PLAIN(kind) some_rows(kind, 0, row_T + t, (const char *)queries_QD + q * bytes, bytes, NULL, product)
                const int at = t % rows_at_once(kind);
                if (!at && q) BY_KIND(kind, PLAIN);
                else if (!at) BY_KIND(kind, FETCH);
#undef PLAIN
#undef FETCH
                float *best = best_PQ + passage_T[t] * queries + q;
                __m128 score = product[at];
                if (kind == INT8) score *= _mm_set1_ps(scale_T[t]) * _mm_loadu_ps(unit_Q + q);
                _mm_storeu_ps(best, _mm_max_ps(score, _mm_loadu_ps(best)));
            }
        }
    }
}

/* The inner product of `exact.py`: products in float64, which are exact, the upper half added to the lower until one is
   left. Where four divides D, the first two additions are done at once, in the same order. Under Python's -fwrapv
   compilers vectorise these loops, and that of scales above, only where their index has 64 bits. */
AVX2 static float exact_score(const float *restrict row, const double *restrict query, int64_t dimension,
                              double *restrict terms) {
    const int64_t parts = dimension % 4 ? 1 : 4, part = dimension / parts;
    for (int64_t d = 0; d < part; d++) {
        const int64_t one = d + part, two = one + part, three = two + part;
        terms[d] = query[d] * row[d];
        if (parts == 4)
            terms[d] = (terms[d] + query[two] * row[two]) + (query[one] * row[one] + query[three] * row[three]);
    }
    for (int64_t left = part; left > 1; left -= left / 2)
        for (int64_t d = 0; d < left / 2; d++) terms[d] += terms[left - left / 2 + d];
    return dimension ? (float)terms[0] + 0.0f : 0; /* + 0 makes every zero the positive one */
}

/* The exact best view of passages `row_M` for queries `query_M`. `row_ptr` are the first vectors of the block's
   passages; the lowest view number wins a tie, and a score that is not finite makes the best NaN. Views that their
   product in float32 excludes are left out: its error is below D 2^-24 times both norms. `space` holds as many values
   as a query, and as many in float32. */
AVX2 void mvr_rescore(int kind, const void *rows, const int64_t *row_ptr, const int16_t *number_N, int dimension,
                      const float *queries_QD, const double *wide_QD, int64_t count, const int64_t *query_M,
                      const int64_t *row_M, float *score_M, int16_t *view_M, double *space) {
    const unsigned state = _mm_getcsr();
    const int64_t line = (int64_t)dimension * size_of(kind);
    float norm = 0, *wide = (float *)(space + dimension);
    _mm_setcsr(PLAIN_STATE);
    for (int64_t m = 0; m < count; m++) {
        const float *query = queries_QD + query_M[m] * dimension;
        const char *next = (const char *)rows + row_ptr[row_M[m + 1 < count ? m + 1 : m]] * line;
        float best = -INFINITY, upper[64];
        int16_t view = INT16_MAX;
        if (!m || query_M[m] != query_M[m - 1])
            norm = sqrtf(row_product(FLOAT32, (const char *)query, query, dimension, 0, NULL) + dimension * FLT_MIN);
        for (int64_t first = row_ptr[row_M[m]], end = row_ptr[row_M[m] + 1], last; first < end; first = last) {
            float least = best, square;
            last = end - first > 64 ? first + 64 : end;
            for (int64_t n = first; n < last; n++, next += line) {
                for (int64_t at = 0; at < line; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
                const float product = product_of(kind, (const char *)rows + n * line, query, dimension, &square);
                const float size = norm * sqrtf(square + dimension * FLT_MIN); /* allows for underflow */
                const float error = size < 1e38f ? (dimension + 4) * FLT_EPSILON * size : INFINITY;
                upper[n - first] = product + error;
                if (product - error > least) least = product - error;
            }
            for (int64_t n = first; n < last; n++) {
                if (upper[n - first] < least) continue;
                const char *own = (const char *)rows + n * line;
                const float *row = kind == FLOAT16 ? to_floats(kind, own, dimension, wide) : (const float *)own;
                const float score = exact_score(row, wide_QD + query_M[m] * dimension, dimension, space);
                if (score > best || (score == best && number_N[n] < view)) view = number_N[n];
                if (score > best) best = score;
                if (!(fabsf(score) <= FLT_MAX)) best = NAN;
            }
        }
        score_M[m] = best, view_M[m] = view;
    }
    _mm_setcsr(state);
}
#else
int mvr_supported(void) { return 0; }
int mvr_supported_avx2(void) { return 0; }
#endif

/* Increase the number when arguments or structs change, here and in `native.py`. */
int mvr_interface(void) { return 10; }
