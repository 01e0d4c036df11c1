#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Bytes and 32-bit words per block; checksum.py defines the sum of a block. */
enum { BLOCK = 1024, WORDS = BLOCK / 4, LANES = 8 };

/* Returns the sum of a block, and copies it if `to` is not null. */
static uint64_t add_block(const char *from, char *to, const int32_t *multipliers) {
    uint64_t sums[LANES] = {0}, total = 0;
    for (int i = 0; i < WORDS; i += LANES) {
        int32_t words[LANES];
        memcpy(words, from + 4 * i, sizeof words);
        if (to) memcpy(to + 4 * i, words, sizeof words);
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (uint64_t)((int64_t)words[lane] * multipliers[i + lane]);
    }
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}

#if defined(__AVX2__)
/* Processes 32 bytes: adds products of the even words to *even, of the odd words to *odd; returns the bytes. */
static inline __m256i add_vector(const char *from, const int32_t *multipliers, __m256i *even, __m256i *odd) {
    __m256i x = _mm256_loadu_si256((const __m256i *)from);
    __m256i m = _mm256_loadu_si256((const __m256i *)multipliers);
    *even = _mm256_add_epi64(*even, _mm256_mul_epi32(x, m));
    *odd = _mm256_add_epi64(*odd, _mm256_mul_epi32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(m, 32)));
    return x;
}

static uint64_t total_of(__m256i even, __m256i odd) {
    uint64_t sums[4];
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(even, odd));
    return sums[0] + sums[1] + sums[2] + sums[3];
}

static uint64_t read_block(const char *from, const int32_t *multipliers) {
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int at = 0; at < BLOCK; at += 32) add_vector(from + at, multipliers + at / 4, &even, &odd);
    return total_of(even, odd);
}

/* Copies with non-temporal stores: the destination is not read into the cache first. */
static uint64_t stream_block(const char *from, char *to, const int32_t *multipliers) {
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int at = 0; at < BLOCK; at += 32)
        _mm256_stream_si256((__m256i *)(to + at), add_vector(from + at, multipliers + at / 4, &even, &odd));
    return total_of(even, odd);
}
#define FENCE() _mm_sfence()
#else
#define read_block(from, multipliers) add_block(from, 0, multipliers)
#define stream_block add_block
#define FENCE()
#endif

/* Writes the sum of each block, and copies the blocks if `to` is not null. Other processes see the copy before anything written after
   this function returns. */
int add_blocks(const char *from, char *to, uint64_t *sums, const int32_t *multipliers, int64_t blocks, int threads) {
    int streams = (uintptr_t)to % 32 == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const char *source = from + b * BLOCK;
            char *place = to + b * BLOCK;
            if (!to) sums[b] = read_block(source, multipliers);
            else if (streams) sums[b] = stream_block(source, place, multipliers);
            else sums[b] = add_block(source, place, multipliers);
        }
        FENCE();
    }
    __sync_synchronize();
    return 0;
}
