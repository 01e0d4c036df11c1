#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Bytes and 64-bit words of a block. */
enum { BLOCK = 1024, WORDS = BLOCK / 8, LANES = 8 };

/* Copies a block; returns the sum of its words, modulo 2^64. */
static uint64_t copy_block(const char *from, char *to) {
    uint64_t sums[LANES] = {0}, total = 0;
    for (int i = 0; i < WORDS; i += LANES) {
        uint64_t words[LANES];
        memcpy(words, from + 8 * i, sizeof words);
        memcpy(to + 8 * i, words, sizeof words);
        for (int lane = 0; lane < LANES; lane++) sums[lane] += words[lane];
    }
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}

#if defined(__AVX2__)
/* The same, past the caches: memory that is written and not read here is not read first either. */
static uint64_t stream_block(const char *from, char *to) {
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int at = 0; at < BLOCK; at += 64) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i y = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(to + at), x);
        _mm256_stream_si256((__m256i *)(to + at + 32), y);
        even = _mm256_add_epi64(even, x);
        odd = _mm256_add_epi64(odd, y);
    }
    uint64_t sums[4];
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(even, odd));
    return sums[0] + sums[1] + sums[2] + sums[3];
}
#define FENCE() _mm_sfence()
#else
#define stream_block copy_block
#define FENCE()
#endif

/* Copies blocks and writes the sum of each. When it returns, other processes see the bytes before anything that is written later. */
int copy_and_add(const char *from, char *to, uint64_t *sums, int64_t blocks, int threads) {
    int streams = (uintptr_t)to % 32 == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const char *source = from + b * BLOCK;
            sums[b] = streams ? stream_block(source, to + b * BLOCK) : copy_block(source, to + b * BLOCK);
        }
        FENCE();
    }
    __sync_synchronize();
    return 0;
}
