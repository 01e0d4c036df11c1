/* What the functions of this folder share: vectors, their sums, the exponential, room for intermediate numbers.
 *
 * Every row's result depends on that row alone, sums have one fixed order, and work is dealt out in pieces that do not depend on the
 * number of threads, so results do not either. Vectors are those of GCC and Clang ("vector extensions"), as wide as the
 * processor's registers. Sizes are 64-bit, matrices row-major; a function that returns int returns 0, or 1 for what its comment says.
 */
#ifndef MILES_VECTOR_H
#define MILES_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t size;

/* One vector register of the processor. */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float vec __attribute__((vector_size(BYTES)));
typedef int32_t mask __attribute__((vector_size(BYTES)));
typedef float quarter __attribute__((vector_size(16)));

enum { W = BYTES / 4 };

/* Below this many elements a second thread costs more than it brings. */
#define WORTH(elements) ((elements) > 16384)
#define PARALLEL(elements) PRAGMA(omp parallel for schedule(static) num_threads(threads) if (threads > 1 && WORTH(elements)))
#define PRAGMA(x) _Pragma(#x)

static inline vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec pick(mask m, vec a, vec b) { return (vec)(((mask)a & m) | ((mask)b & ~m)); }

/* Four numbers that add up to those of v. */
static inline quarter fold(vec v) {
    union { vec whole; quarter parts[W / 4]; } u = {v};
#if BYTES == 64
    return (u.parts[0] + u.parts[2]) + (u.parts[1] + u.parts[3]);
#elif BYTES == 32
    return u.parts[0] + u.parts[1];
#else
    return u.parts[0];
#endif
}
static inline float sum(vec v) {
    quarter q = fold(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
static inline float highest(vec v) {
    typedef int32_t quarter_mask __attribute__((vector_size(16)));
    union { vec whole; quarter parts[W / 4]; } u = {v};
    quarter q = u.parts[0];
    for (int i = 1; i < W / 4; i++) {
        quarter_mask more = u.parts[i] > q;
        q = (quarter)(((quarter_mask)u.parts[i] & more) | ((quarter_mask)q & ~more));
    }
    float a = q[0] > q[1] ? q[0] : q[1], b = q[2] > q[3] ? q[2] : q[3];
    return a > b ? a : b;
}

/* Room of the calling thread for n floats, kept for its next call; null without memory. What it held is lost. */
static float *scratch(size n) {
    static _Thread_local float *room;
    static _Thread_local size held;
    if (n > held) {
        free(room);
        held = 0;
        if (posix_memalign((void **)&room, 64, (size_t)n * sizeof(float))) return room = NULL;
        held = n;
    }
    return room;
}

static inline float dot(const float *a, const float *b, size n) {
    vec total = splat(0);
    size i = 0;
    for (; i + W <= n; i += W) total += load(a + i) * load(b + i);
    float s = sum(total);
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}

static inline void add_scaled(float *y, float a, const float *x, size n) {
    vec va = splat(a);
    size i = 0;
    for (; i + W <= n; i += W) store(y + i, load(y + i) + va * load(x + i));
    for (; i < n; i++) y[i] += a * x[i];
}

/* e**x after Cephes' expf (Moshier): within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN. */
static inline vec exponential(vec x) {
    const vec low = splat(-87.33f), high = splat(88.72f);
    vec c = pick(x < low, low, pick(x > high, high, x));
    vec shifted = c * 1.44269504088896341f;
    vec n = __builtin_convertvector(__builtin_convertvector(shifted + pick(shifted < 0, splat(-0.5f), splat(0.5f)), mask), vec);
    vec r = c - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* 2**n in two factors, as n may be 128. */
    mask whole = __builtin_convertvector(n, mask), half = whole >> 1;
    vec y = p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
    y = pick(x < low, splat(0), pick(x > high, splat(INFINITY), y));
    return pick(x == x, y, x);
}

/* n numbers (at most W) into a vector, filled up with zeros; and back. */
static inline vec load_some(const float *p, size n) {
    vec v = splat(0);
    memcpy(&v, p, (size_t)(n < W ? n : W) * sizeof(float));
    return v;
}
static inline void store_some(float *p, vec v, size n) { memcpy(p, &v, (size_t)(n < W ? n : W) * sizeof(float)); }

/* ---- gated units ---------------------------------------------------------------------------------------------------- */

/* product [2 n] = gate | up -> out [n] = silu(gate) * up. */
static inline void gate(const float *product, float *out, size n) {
    const float *up = product + n;
    size i = 0;
    for (; i + W <= n; i += W) {
        vec g = load(product + i);
        store(out + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    if (i < n) {
        vec g = load_some(product + i, n - i);
        store_some(out + i, g / (1.0f + exponential(-g)) * load_some(up + i, n - i), n - i);
    }
}

typedef struct { vec scaled, gate, up, scale; } GateGradient;

static inline GateGradient gate_gradient(vec gate, vec up, vec grad, float scale) {
    vec sigmoid = 1.0f / (1.0f + exponential(-gate)), silu = gate * sigmoid, h = silu * up, d = grad * scale;
    return (GateGradient){h * scale, d * up * (sigmoid * (1.0f + gate * (1.0f - sigmoid))), d * silu, grad * h};
}

/* Given product and grad [n], the gradient of h = silu(gate) * up before it is multiplied by scale: scaled [n] = h * scale, the
 * gradient of product [2 n], and, returned, the gradient of scale, grad . h. */
static inline float gate_backward(const float *product, const float *grad, float scale, float *scaled, float *grad_product, size n) {
    const float *up = product + n;
    float *g_up = grad_product + n;
    vec total = splat(0);
    size i = 0;
    for (; i + W <= n; i += W) {
        GateGradient d = gate_gradient(load(product + i), load(up + i), load(grad + i), scale);
        store(scaled + i, d.scaled), store(grad_product + i, d.gate), store(g_up + i, d.up);
        total += d.scale;
    }
    if (i < n) {
        size m = n - i;
        GateGradient d = gate_gradient(load_some(product + i, m), load_some(up + i, m), load_some(grad + i, m), scale);
        store_some(scaled + i, d.scaled, m), store_some(grad_product + i, d.gate, m), store_some(g_up + i, d.up, m);
        total += d.scale;
    }
    return sum(total);
}

#endif
