/* The most that one core reads and multiplies, without anything to read or multiply for: what floors.py times. */
#include <stdint.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef uint64_t words __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));

#if defined(__AVX512F__)
#define SUMS 12 /* of 32 registers; each product waits four cycles for the one before it, and two begin in a cycle */
#else
#define SUMS 5 /* of two registers each, of 16 */
#endif

/* Exclusive or of all words of `bytes`, a multiple of 256, that ask for what lies `ahead` of them. */
uint64_t read_all(const char *from, int64_t bytes, int64_t ahead) {
    words sum[4] = {0};
    for (int64_t at = 0; at + 256 <= bytes; at += 256) {
        const words *here = (const words *)(from + at);
        for (int part = 0; part < 4; part++) {
            __builtin_prefetch(from + at + ahead + 64 * part, 0, 2);
            sum[part] ^= here[part];
        }
    }
    words all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    uint64_t one = 0;
    for (int part = 0; part < 8; part++) one ^= all[part];
    return one;
}

/* Sums, the first from 0, the second from `share` and so on, lest they be one, that go towards 1 by `share` of what is
   left, `rounds` times: their total is left in `total`. Returns how many operations that took. */
int64_t multiply_float32(float share, int64_t rounds, float *total) {
    const floats none = {0}, keep = 1 - share - none, add = share - none;
    floats sum[SUMS];
    for (int one = 0; one < SUMS; one++) sum[one] = one * share - none;
    for (int64_t round = 0; round < rounds; round++)
        for (int one = 0; one < SUMS; one++) sum[one] = sum[one] * keep + add;
    *total = 0;
    for (int one = 0; one < SUMS; one++)
        for (int lane = 0; lane < 16; lane++) *total += sum[one][lane];
    return rounds * SUMS * 16 * 2;
}

/* Sums, begun alike, to which both products of a pair, 1 x `share` each, are added, `rounds` times. Returns how many
   operations that took, 0 where the processor has no such products. */
int64_t multiply_bfloat16(float share, int64_t rounds, float *total) {
#if defined(__AVX512BF16__)
    const __m512bh ones = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
    const __m512bh shares = _mm512_cvtne2ps_pbh(_mm512_set1_ps(share), _mm512_set1_ps(share));
    __m512 sum[SUMS];
    for (int one = 0; one < SUMS; one++) sum[one] = _mm512_set1_ps(one * share);
    for (int64_t round = 0; round < rounds; round++)
        for (int one = 0; one < SUMS; one++) sum[one] = _mm512_dpbf16_ps(sum[one], ones, shares);
    *total = 0;
    for (int one = 0; one < SUMS; one++) *total += _mm512_reduce_add_ps(sum[one]);
    return rounds * SUMS * 16 * 4;
#else
    (void)share, (void)rounds;
    *total = 0;
    return 0;
#endif
}
