/* The hot loops of exact search for processors with AVX-512 and VNNI; `native.py` calls them, and says what they mean.

   A tile is ROWS vectors in a row. Its inner products with a panel of queries stay in registers: the best view of each
   passage is taken there, and compared there with what a passage must reach, so that scores never go to memory. A
   passage may spread over tiles; `best` carries its maximum from one to the next.

   Shapes: Q queries, P passages, N vectors, D dimension, K best lower bounds kept for each query. */

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define FAST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")))
#define INLINE FAST static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define ROWS 8
#define LANES 16
#define PLAIN_STATE 0x1f80 /* round to nearest, no flushing of small numbers, whatever the caller's thread has set */

enum { FLOAT32, FLOAT16, INT8 };

int mvr_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

/* What is known of the queries, and what was found. `low_QK` holds a heap a query, the least first. */
typedef struct {
    int32_t queries, kept;
    const float *error_Q;
    float *low_QK, *cut_Q; /* a score below cut_Q cannot matter; cut_Q is padded to whole panels with +inf */
    int64_t room, found;
    int64_t *query_M, *passage_M;
    float *upper_M;
} Search;

static float cut(float low, float error) {
    float value = low - error;
    return value - (fabsf(low) + error) * 0x1p-21f; /* -inf stays -inf */
}

/* One score that reached the cut: keep it if `a + e` reaches the k-th lower bound, and let `a - e` take its place. */
static void emit(Search *s, int query, int64_t passage, float score) {
    float *heap = s->low_QK + (int64_t)query * s->kept, error = s->error_Q[query];
    if (!(score + error >= heap[0])) return;
    s->query_M[s->found] = query;
    s->passage_M[s->found] = passage;
    s->upper_M[s->found++] = score + error;
    float low = score - error;
    if (!(low > heap[0])) return;
    int at = 0;
    for (int child; (child = 2 * at + 1) < s->kept; at = child) {
        if (child + 1 < s->kept && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= low) break;
        heap[at] = heap[child];
    }
    heap[at] = low;
    s->cut_Q[query] = cut(heap[0], error);
}

FAST static void emit_lanes(Search *s, unsigned mask, int first, int64_t passage, __m512 scores) {
    float lanes[LANES];
    _mm512_storeu_ps(lanes, scores);
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        emit(s, first + lane, passage, lanes[lane]);
    }
}

/* The scores of a tile's rows with LANES queries: maximum over each passage's rows, and out with the good ones.
   Bit r of `ends` is set where row r is the last of its passage. */
INLINE void settle(Search *s, const __m512 *score_R, unsigned ends, int64_t passage, int first, float *best) {
    __m512 most = _mm512_loadu_ps(best);
    UNROLL for (int r = 0; r < ROWS; r++) {
        most = _mm512_max_ps(most, score_R[r]);
        if (ends >> r & 1) {
            unsigned mask = _mm512_cmp_ps_mask(most, _mm512_loadu_ps(s->cut_Q + first), _CMP_GE_OQ);
            if (__builtin_expect(mask, 0)) emit_lanes(s, mask, first, passage, most);
            passage++;
            most = _mm512_set1_ps(-INFINITY);
        }
    }
    _mm512_storeu_ps(best, most);
}

INLINE void float_panel(Search *s, const float *tile_RD, const float *panel, int dimension, const int width,
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
    UNROLL for (int w = 0; w < width; w++) settle(s, sum[w], ends, passage, first + w * LANES, best + w * LANES);
}

/* Panels of 48 queries, the last of 16, 32 or 48: [panel][D][queries of the panel]. */
FAST static void float_tile(Search *s, const float *tile_RD, const float *asked, int dimension, unsigned ends,
                            int64_t passage, float *best_Q) {
    for (int first = 0; first < s->queries;) {
        int left = s->queries - first;
        const float *panel = asked + (int64_t)first * dimension;
        float *best = best_Q + first;
        if (left > 2 * LANES) {
            float_panel(s, tile_RD, panel, dimension, 3, ends, passage, first, best), first += 3 * LANES;
        } else if (left > LANES) {
            float_panel(s, tile_RD, panel, dimension, 2, ends, passage, first, best), first += 2 * LANES;
        } else {
            float_panel(s, tile_RD, panel, dimension, 1, ends, passage, first, best), first += LANES;
        }
    }
}

/* Integer products of codes, made unsigned by adding 128, with queries of 16 bits in two halves, high and low. Panels
   of 16 queries: [panel][D / 4][high, low][16 queries][4]. `bias` takes the 128 off again: [panel][high, low][16]. */
FAST static void code_tile(Search *s, const uint8_t *tile_RD, int stride, const float *scale_R, const int8_t *asked,
                           const int32_t *bias, const float *unit_Q, unsigned ends, int64_t passage, float *best_Q) {
    for (int first = 0; first < s->queries; first += LANES) {
        const int8_t *panel = asked + (int64_t)first * stride * 2;
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
        settle(s, score_R, ends, passage, first, best_Q + first);
    }
}

/* One query: rows are read along D, so that each byte of the vectors is touched once. */
INLINE void float_rows(const void *tile, const int half, const float *query, int dimension, int ahead, float *score) {
    __m512 sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
    int d = 0;
    for (; d + LANES <= dimension; d += LANES) {
        __m512 part = _mm512_loadu_ps(query + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            int64_t at = (int64_t)r * dimension + d;
            __m512 row;
            if (half) {
                const uint16_t *from = (const uint16_t *)tile + at;
                row = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
                if (d & LANES) _mm_prefetch((const char *)from + ahead, _MM_HINT_T0);
            } else {
                const float *from = (const float *)tile + at;
                row = _mm512_loadu_ps(from);
                _mm_prefetch((const char *)from + ahead, _MM_HINT_T0);
            }
            sum[r] = _mm512_fmadd_ps(row, part, sum[r]);
        }
    }
    if (d < dimension) {
        __mmask16 rest = (__mmask16)((1u << (dimension - d)) - 1);
        __m512 part = _mm512_maskz_loadu_ps(rest, query + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            int64_t at = (int64_t)r * dimension + d;
            __m512 row = half ? _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, (const uint16_t *)tile + at))
                              : _mm512_maskz_loadu_ps(rest, (const float *)tile + at);
            sum[r] = _mm512_fmadd_ps(row, part, sum[r]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) score[r] = _mm512_reduce_add_ps(sum[r]);
}

/* `high`, `low`: the query, padded with zeros to 64; `bias`: for each 4 bytes of 64, of both halves. */
INLINE void code_rows(const int8_t *tile, const float *scale_R, const int8_t *high, const int8_t *low,
                      const int32_t *bias, float unit, int dimension, int ahead, float *score) {
    __m512i sum_high[ROWS], sum_low[ROWS], flip = _mm512_set1_epi8(-128);
    UNROLL for (int r = 0; r < ROWS; r++) {
        sum_high[r] = _mm512_loadu_si512(bias);
        sum_low[r] = _mm512_loadu_si512(bias + LANES);
    }
    for (int d = 0; d < dimension; d += 64) {
        __mmask64 rest = dimension - d >= 64 ? ~0ull : (1ull << (dimension - d)) - 1;
        __m512i part_high = _mm512_loadu_si512(high + d), part_low = _mm512_loadu_si512(low + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const int8_t *from = tile + (int64_t)r * dimension + d;
            __m512i row = _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, from), flip);
            _mm_prefetch((const char *)from + ahead, _MM_HINT_T0);
            sum_high[r] = _mm512_dpbusd_epi32(sum_high[r], row, part_high);
            sum_low[r] = _mm512_dpbusd_epi32(sum_low[r], row, part_low);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sum_high[r], 8), sum_low[r]);
        score[r] = _mm512_reduce_add_ps(_mm512_cvtepi32_ps(sum)) * (unit * scale_R[r]);
    }
}

INLINE void settle_one(Search *s, const float *score_R, int rows, unsigned ends, int64_t passage, float *best) {
    float most = *best;
    for (int r = 0; r < rows; r++) {
        most = score_R[r] > most ? score_R[r] : most;
        if (ends >> r & 1) {
            if (__builtin_expect(most >= s->cut_Q[0], 0)) emit(s, 0, passage, most);
            passage++;
            most = -INFINITY;
        }
    }
    *best = most;
}

/* Passages `first` to `passages` of a step, or as many as there is room for: the number of the next one to scan.
   `rows` are the step's vectors, [N, D], or codes with their scales. `space` holds a tile and a maximum a query. */
FAST int64_t mvr_scan(int kind, const void *rows, const float *scale_N, const int64_t *count_P, int64_t first,
                      int64_t passages, int dimension, const void *asked, const int32_t *bias, const float *unit_Q,
                      int ahead, Search *s, void *space) {
    const int size = kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1, stride = (dimension + 3) / 4 * 4;
    const int alone = s->queries == 1 && dimension <= 8192; /* beyond, sums of one query's codes could overflow */
    const int padded = (s->queries + LANES - 1) / LANES * LANES, wide = stride > 64 ? stride : 64;
    float *best_Q = space, *tile = best_Q + padded;
    const char *from = rows;
    const unsigned state = _mm_getcsr();
    _mm_setcsr(PLAIN_STATE);
    int64_t total = 0, at = 0, passage = first;
    for (int64_t p = 0; p < passages; p++) *(p < first ? &at : &total) += count_P[p];
    total += at;
    for (int q = 0; q < padded; q++) best_Q[q] = -INFINITY;
    for (int q = 0; q < s->queries; q++) s->cut_Q[q] = cut(s->low_QK[(int64_t)q * s->kept], s->error_Q[q]);
    for (int64_t left = passage < passages ? count_P[passage] : 0; at < total; at += ROWS) {
        if (s->room - s->found < (int64_t)ROWS * s->queries) break;
        const int here = total - at < ROWS ? (int)(total - at) : ROWS;
        const int64_t before = passage;
        unsigned ends = 0;
        for (int r = 0; r < here; r++)
            if (!--left) {
                ends |= 1u << r;
                left = ++passage < passages ? count_P[passage] : 0;
            }
        const char *part = from + at * dimension * size;
        float scale_R[ROWS] = {0};
        if (kind == INT8) memcpy(scale_R, scale_N + at, here * sizeof(float));
        if (here < ROWS) part = memcpy((char *)(tile + ROWS * wide), part, (size_t)here * dimension * size);
        if (alone) {
            float score_R[ROWS];
            if (kind == FLOAT32) float_rows(part, 0, asked, dimension, ahead, score_R);
            if (kind == FLOAT16) float_rows(part, 1, asked, dimension, ahead, score_R);
            const int8_t *high = asked, *low = high + (dimension + 63) / 64 * 64;
            if (kind == INT8) code_rows((const int8_t *)part, scale_R, high, low, bias, unit_Q[0], dimension, ahead, score_R);
            settle_one(s, score_R, here, ends, before, best_Q);
            continue;
        }
        if (kind == INT8) {
            uint8_t *codes = (uint8_t *)tile;
            for (int r = 0; r < ROWS; r++)
                for (int d = 0; d < dimension; d++) codes[r * stride + d] = (uint8_t)part[r * dimension + d] ^ 0x80;
            code_tile(s, codes, stride, scale_R, asked, bias, unit_Q, ends, before, best_Q);
            continue;
        }
        if (kind == FLOAT16) {
            const int values = ROWS * dimension;
            for (int d = 0; d + LANES <= values; d += LANES)
                _mm512_storeu_ps(tile + d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(part + 2 * d))));
            if (values % LANES) { /* ROWS * D is a multiple of 8 */
                const int d = values - LANES / 2;
                _mm256_storeu_ps(tile + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(part + 2 * d))));
            }
            part = (const char *)tile;
        }
        float_tile(s, (const float *)part, asked, dimension, ends, before, best_Q);
    }
    _mm_setcsr(state);
    return passage;
}

/* The largest norm, in float32; NaN if any vector's is NaN. */
FAST float mvr_max_norm(int kind, const void *rows, const float *scale_N, int64_t count, int dimension) {
    float most = 0;
    for (int64_t n = 0; n < count; n++) {
        __m512 sum = _mm512_setzero_ps();
        for (int d = 0; d < dimension; d += LANES) {
            const __mmask16 rest = dimension - d >= LANES ? 0xffff : (__mmask16)((1u << (dimension - d)) - 1);
            const int64_t at = n * dimension + d;
            __m512 row;
            if (kind == FLOAT32) row = _mm512_maskz_loadu_ps(rest, (const float *)rows + at);
            else if (kind == FLOAT16) row = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, (const uint16_t *)rows + at));
            else row = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(rest, (const int8_t *)rows + at)));
            sum = _mm512_fmadd_ps(row, row, sum);
        }
        const float norm = sqrtf(_mm512_reduce_add_ps(sum)) * (kind == INT8 ? scale_N[n] : 1);
        if (norm != norm) return norm;
        most = norm > most ? norm : most;
    }
    return most;
}

/* Exact scores (`exact.py`): products in float64, the upper half added onto the lower until one is left, rounded once.
   `row_ptr` are the first vectors of the block's passages; the lowest view number wins a tie. */
FAST void mvr_rescore(int kind, const void *rows, const int64_t *row_ptr, const int16_t *number_N, int dimension,
                      const float *queries_QD, int64_t count, const int64_t *query_M, const int64_t *row_M,
                      float *score_M, int16_t *view_M, double *terms) {
    const unsigned state = _mm_getcsr();
    _mm_setcsr(PLAIN_STATE);
    for (int64_t m = 0; m < count; m++) {
        const float *query = queries_QD + query_M[m] * dimension;
        float best = -INFINITY;
        int16_t view = INT16_MAX;
        for (int64_t n = row_ptr[row_M[m]]; n < row_ptr[row_M[m] + 1]; n++) {
            for (int d = 0; d < dimension; d += 8) {
                const __mmask8 rest = dimension - d >= 8 ? 0xff : (__mmask8)((1u << (dimension - d)) - 1);
                const int64_t at = n * dimension + d;
                __m256 row;
                if (kind == FLOAT32) row = _mm256_maskz_loadu_ps(rest, (const float *)rows + at);
                else row = _mm256_cvtph_ps(_mm_maskz_loadu_epi16(rest, (const uint16_t *)rows + at));
                const __m512d product =
                    _mm512_mul_pd(_mm512_cvtps_pd(_mm256_maskz_loadu_ps(rest, query + d)), _mm512_cvtps_pd(row));
                _mm512_mask_storeu_pd(terms + d, rest, product);
            }
            for (int left = dimension, half; left > 1; left = half) {
                half = (left + 1) / 2;
                const double *upper = terms + half;
#pragma GCC ivdep
                for (int d = 0; d < left - half; d++) terms[d] += upper[d];
            }
            const float score = dimension ? (float)(terms[0] + 0.0) : 0;
            if (score > best || (score == best && number_N[n] < view)) view = number_N[n];
            if (score > best) best = score;
        }
        score_M[m] = best;
        view_M[m] = view;
    }
    _mm_setcsr(state);
}
#else
int mvr_supported(void) { return 0; }
#endif
