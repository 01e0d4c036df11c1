/* Float32 steps of a transformer layer that PyTorch has only as several operations on a CPU: each is one pass over its rows here.
 *
 * Matrix products stay with PyTorch. Every row's result depends on that row alone, sums have one fixed order, and work is dealt
 * out in pieces that do not depend on the number of threads, so results do not either. Vectors are those of GCC and Clang
 * ("vector extensions"), 16 wide whatever the processor has.
 *
 * Sizes are 64-bit, matrices dense and row-major, pointers valid for what the comment of each function says.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t size;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t mask __attribute__((vector_size(64)));

enum { W = 16, TILE = 4 };

/* Below this many elements a second thread costs more than it brings. */
#define WORTH(elements) ((elements) > 16384)
#define PARALLEL(elements) _Pragma_(omp parallel for schedule(static) num_threads(threads) if (threads > 1 && WORTH(elements)))
#define _Pragma_(x) _Pragma(#x)

static inline vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec splat(float x) { vec v; for (int i = 0; i < W; i++) v[i] = x; return v; }
static inline vec pick(mask m, vec a, vec b) { return (vec)(((mask)a & m) | ((mask)b & ~m)); }

typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));
typedef union { vec whole; half_vec half[2]; } Halves;
typedef union { half_vec whole; quarter_vec half[2]; } Quarters;

/* Four numbers that add up to those of v. */
static inline quarter_vec fold(vec v) {
    Halves h = {v};
    Quarters q = {h.half[0] + h.half[1]};
    return q.half[0] + q.half[1];
}
static inline float sum(vec v) {
    quarter_vec q = fold(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
static inline float highest(vec v) {
    Halves h = {v};
    half_vec a = h.half[0], b = h.half[1];
    float best = -INFINITY;
    for (int i = 0; i < W / 2; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    for (int i = 0; i < W / 2; i++) best = a[i] > best ? a[i] : best;
    return best;
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

/* ---- root mean square norm ------------------------------------------------------------------------------------------ */

/* out = weight * x / sqrt(mean(x**2) + eps); inverse [rows] keeps the factor of each row. */
void rms_norm(const float *x, const float *weight, float *out, float *inverse, size rows, size dim, float eps, int threads) {
    PARALLEL(rows * dim)
    for (size r = 0; r < rows; r++) {
        const float *a = x + r * dim;
        float factor = 1.0f / sqrtf(dot(a, a, dim) / (float)dim + eps);
        inverse[r] = factor;
        float *o = out + r * dim;
        size i = 0;
        for (; i + W <= dim; i += W) store(o + i, load(weight + i) * (load(a + i) * factor));
        for (; i < dim; i++) o[i] = weight[i] * (a[i] * factor);
    }
}

/* Gradients of rms_norm. partial [pieces, dim] is room for the weight's gradient in pieces of the rows, added up in order. */
void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *inverse, float *grad_x,
                       float *grad_weight, float *partial, size pieces, size rows, size dim, int threads) {
    memset(partial, 0, (size_t)(pieces * dim) * sizeof(float));
    PARALLEL(rows * dim)
    for (size piece = 0; piece < pieces; piece++) {
        float *gw = partial + piece * dim;
        for (size r = rows * piece / pieces; r < rows * (piece + 1) / pieces; r++) {
            const float *g = grad + r * dim, *a = x + r * dim;
            float factor = inverse[r], *o = grad_x + r * dim;
            vec total = splat(0);
            float rest = 0;
            size i = 0;
            for (; i + W <= dim; i += W) total += load(g + i) * load(weight + i) * load(a + i);
            for (; i < dim; i++) rest += g[i] * weight[i] * a[i];
            float inner = (sum(total) + rest) * factor * factor / (float)dim;
            for (i = 0; i + W <= dim; i += W) {
                vec gi = load(g + i), ai = load(a + i);
                store(o + i, (gi * load(weight + i) - ai * inner) * factor);
                store(gw + i, load(gw + i) + gi * (ai * factor));
            }
            for (; i < dim; i++) {
                o[i] = (g[i] * weight[i] - a[i] * inner) * factor;
                gw[i] += g[i] * (a[i] * factor);
            }
        }
    }
    memset(grad_weight, 0, (size_t)dim * sizeof(float));
    for (size piece = 0; piece < pieces; piece++) add_scaled(grad_weight, 1.0f, partial + piece * dim, dim);
}

/* ---- rotary position embedding -------------------------------------------------------------------------------------- */

/* x [rows, heads, dim] -> out, halves rotated by cosine and sine [rows, dim]; backward turns a gradient the other way. */
void rotate(const float *x, const float *cosine, const float *sine, float *out, size rows, size heads, size dim, int backward,
            int threads) {
    size half = dim / 2;
    PARALLEL(rows * heads * dim)
    for (size r = 0; r < rows; r++) {
        const float *c = cosine + r * dim, *d = c + half, *s = sine + r * dim, *t = s + half;
        for (size h = 0; h < heads; h++) {
            const float *a = x + (r * heads + h) * dim, *b = a + half;
            float *o = out + (r * heads + h) * dim, *p = o + half;
            size i = 0;
            for (; i + W <= half; i += W) {
                vec ai = load(a + i), bi = load(b + i), si = load(s + i), ti = load(t + i);
                vec across = backward ? bi * ti : -(bi * si), back = backward ? -(ai * si) : ai * ti;
                store(o + i, ai * load(c + i) + across);
                store(p + i, bi * load(d + i) + back);
            }
            for (; i < half; i++) {
                o[i] = a[i] * c[i] + (backward ? b[i] * t[i] : -(b[i] * s[i]));
                p[i] = b[i] * d[i] + (backward ? -(a[i] * s[i]) : a[i] * t[i]);
            }
        }
    }
}

/* ---- gated experts -------------------------------------------------------------------------------------------------- */

/* product [rows, 2 inner] = gate | up -> out [rows, inner] = silu(gate) * up. */
void swiglu(const float *product, float *out, size rows, size inner, int threads) {
    PARALLEL(rows * inner)
    for (size r = 0; r < rows; r++) {
        const float *gate = product + r * 2 * inner, *up = gate + inner;
        float *o = out + r * inner;
        size i = 0;
        for (; i + W <= inner; i += W) {
            vec g = load(gate + i);
            store(o + i, g / (1.0f + exponential(-g)) * load(up + i));
        }
        if (i < inner) {
            vec g = load_some(gate + i, inner - i);
            store_some(o + i, g / (1.0f + exponential(-g)) * load_some(up + i, inner - i), inner - i);
        }
    }
}

typedef struct { vec scaled, gate, up, scale; } GateGradient;

static inline GateGradient gate_gradient(vec gate, vec up, vec grad, float scale) {
    vec sigmoid = 1.0f / (1.0f + exponential(-gate)), silu = gate * sigmoid, h = silu * up, d = grad * scale;
    return (GateGradient){h * scale, d * up * (sigmoid * (1.0f + gate * (1.0f - sigmoid))), d * silu, grad * h};
}

/* Given product and grad, the gradient of h = silu(gate) * up before each row is multiplied by its scale [rows]:
 * scaled = h * scale, grad_product, and grad_scale [rows] = grad . h. */
void swiglu_backward(const float *product, const float *grad, const float *scale, float *scaled, float *grad_product,
                     float *grad_scale, size rows, size inner, int threads) {
    PARALLEL(rows * inner)
    for (size r = 0; r < rows; r++) {
        const float *gate = product + r * 2 * inner, *up = gate + inner, *g = grad + r * inner;
        float *g_gate = grad_product + r * 2 * inner, *g_up = g_gate + inner, *s = scaled + r * inner;
        vec total = splat(0);
        size i = 0;
        for (; i + W <= inner; i += W) {
            GateGradient d = gate_gradient(load(gate + i), load(up + i), load(g + i), scale[r]);
            store(s + i, d.scaled), store(g_gate + i, d.gate), store(g_up + i, d.up);
            total += d.scale;
        }
        if (i < inner) {
            size n = inner - i;
            GateGradient d = gate_gradient(load_some(gate + i, n), load_some(up + i, n), load_some(g + i, n), scale[r]);
            store_some(s + i, d.scaled, n), store_some(g_gate + i, d.gate, n), store_some(g_up + i, d.up, n);
            total += d.scale;
        }
        grad_scale[r] = sum(total);
    }
}

/* index [rows, k] names the expert of each choice. The choices sorted by expert, in order within one: order [rows k] and its
 * inverse place, row = order / k; counts [experts], and ends, where each expert's choices end. Returns 1 for a choice that is none. */
int route(const int64_t *index, int64_t *order, int64_t *place, int64_t *row, int64_t *counts, int32_t *ends, size rows, size k,
           size experts) {
    memset(counts, 0, (size_t)experts * sizeof(int64_t));
    for (size i = 0; i < rows * k; i++) {
        if (index[i] < 0 || index[i] >= experts) return 1;
        counts[index[i]]++;
    }
    int64_t next[experts > 0 ? experts : 1], total = 0;
    for (size e = 0; e < experts; e++) next[e] = total, total += counts[e], ends[e] = (int32_t)total;
    for (size i = 0; i < rows * k; i++) {
        int64_t at = next[index[i]]++;
        order[at] = i, place[i] = at, row[at] = i / k;
    }
    return 0;
}

/* out [rows, dim]: each row the sum of its k places of x [places, dim], times weight [rows, k] unless that is null. */
void gather_sum(const float *x, const int64_t *place, const float *weight, float *out, size rows, size k, size dim, int threads) {
    PARALLEL(rows * k * dim)
    for (size r = 0; r < rows; r++) {
        const int64_t *at = place + r * k;
        float *o = out + r * dim;
        size i = 0;
        for (; i + W <= dim; i += W) {
            vec total = splat(0);
            for (size j = 0; j < k; j++) total += load(x + at[j] * dim + i) * (weight ? weight[r * k + j] : 1.0f);
            store(o + i, total);
        }
        for (; i < dim; i++) {
            o[i] = 0;
            for (size j = 0; j < k; j++) o[i] += x[at[j] * dim + i] * (weight ? weight[r * k + j] : 1.0f);
        }
    }
}

/* ---- log-probabilities ---------------------------------------------------------------------------------------------- */

/* out [rows] = log softmax(logits [rows, vocabulary])[token]; norm [rows] = log(sum(exp(logits))). Returns 1 for a token that is none. */
int log_probs(const float *logits, const int64_t *tokens, float *out, float *norm, size rows, size vocabulary, int threads) {
    for (size r = 0; r < rows; r++)
        if (tokens[r] < 0 || tokens[r] >= vocabulary) return 1;
    PARALLEL(rows * vocabulary)
    for (size r = 0; r < rows; r++) {
        const float *x = logits + r * vocabulary;
        vec best = splat(-INFINITY), total = splat(0);
        size i = 0;
        float top = -INFINITY, rest = 0;
        for (; i + W <= vocabulary; i += W) best = pick(load(x + i) > best, load(x + i), best);
        for (; i < vocabulary; i++) top = x[i] > top ? x[i] : top;
        float other = highest(best);
        top = other > top ? other : top;
        for (i = 0; i + W <= vocabulary; i += W) total += exponential(load(x + i) - top);
        if (i < vocabulary) {
            vec e = exponential(load_some(x + i, vocabulary - i) - top);
            for (size j = 0; j < vocabulary - i; j++) rest += e[j];
        }
        norm[r] = top + logf(sum(total) + rest);
        out[r] = x[tokens[r]] - norm[r];
    }
    return 0;
}

/* grad_logits = grad * (one at the token - softmax(logits)). */
void log_probs_backward(const float *grad, const float *logits, const int64_t *tokens, const float *norm, float *grad_logits,
                        size rows, size vocabulary, int threads) {
    PARALLEL(rows * vocabulary)
    for (size r = 0; r < rows; r++) {
        const float *x = logits + r * vocabulary;
        float *o = grad_logits + r * vocabulary;
        size i = 0;
        for (; i + W <= vocabulary; i += W) store(o + i, exponential(load(x + i) - norm[r]) * -grad[r]);
        if (i < vocabulary) store_some(o + i, exponential(load_some(x + i, vocabulary - i) - norm[r]) * -grad[r], vocabulary - i);
        o[tokens[r]] += grad[r];
    }
}

/* ---- attention ------------------------------------------------------------------------------------------------------ */

/* Keys or values that a segment of rows sees: its trunk's, then its own. */
typedef struct { size trunk, trunk_length, own, own_length; } Segment;

static inline size row_of(const Segment *s, size j) { return j < s->trunk_length ? s->trunk + j : s->own + j - s->trunk_length; }
static inline size up16(size n) { return (n + W - 1) / W * W; }

/* x [rows, heads, dim] at one head, of the rows a segment sees -> [n, dim]. */
static void gather(const float *x, const Segment *s, size heads, size head, size dim, float *out) {
    size n = s->trunk_length + s->own_length;
    for (size j = 0; j < n; j++) memcpy(out + j * dim, x + (row_of(s, j) * heads + head) * dim, (size_t)dim * sizeof(float));
}

/* The inverse: x [n, dim] is added to those rows of out [rows, heads, dim]. */
static void scatter_add(const float *x, const Segment *s, size heads, size head, size dim, float *out) {
    size n = s->trunk_length + s->own_length;
    for (size j = 0; j < n; j++) add_scaled(out + (row_of(s, j) * heads + head) * dim, 1.0f, x + j * dim, dim);
}

/* x [n, dim] -> [dim, width], zeros after the n-th column. */
static void transpose(const float *x, size n, size dim, size width, float *out) {
    for (size d = 0; d < dim; d++) {
        for (size j = 0; j < n; j++) out[d * width + j] = x[j * dim + d];
        memset(out + d * width + n, 0, (size_t)(width - n) * sizeof(float));
    }
}

/* out [n, rounded up] = a [dim] times transposed [dim, width]. */
static inline void row_times(const float *a, const float *transposed, size dim, size width, size n, float *out) {
    size blocks = up16(n) / W, b = 0;
    for (; b + TILE <= blocks; b += TILE) {
        vec t0 = splat(0), t1 = t0, t2 = t0, t3 = t0;
        const float *p = transposed + b * W;
        for (size d = 0; d < dim; d++, p += width) {
            float x = a[d];
            t0 += x * load(p), t1 += x * load(p + W), t2 += x * load(p + 2 * W), t3 += x * load(p + 3 * W);
        }
        store(out + b * W, t0), store(out + (b + 1) * W, t1), store(out + (b + 2) * W, t2), store(out + (b + 3) * W, t3);
    }
    for (; b + 2 <= blocks; b += 2) {
        vec t0 = splat(0), t1 = t0;
        const float *p = transposed + b * W;
        for (size d = 0; d < dim; d++, p += width) t0 += a[d] * load(p), t1 += a[d] * load(p + W);
        store(out + b * W, t0), store(out + (b + 1) * W, t1);
    }
    if (b < blocks) {
        vec t0 = splat(0);
        const float *p = transposed + b * W;
        for (size d = 0; d < dim; d++, p += width) t0 += a[d] * load(p);
        store(out + b * W, t0);
    }
}

/* scores [n, rounded up] -> their softmax after scaling, zeros after the n-th; returns log(sum(exp)). */
static inline float softmax(float *scores, size n, float scaling) {
    size width = up16(n);
    for (size j = n; j < width; j++) scores[j] = -INFINITY;
    vec best = splat(-INFINITY);
    for (size j = 0; j < width; j += W) {
        vec s = load(scores + j) * scaling;
        store(scores + j, s);
        best = pick(s > best, s, best);
    }
    float top = highest(best);
    vec total = splat(0);
    for (size j = 0; j < width; j += W) {
        vec e = exponential(load(scores + j) - top);
        store(scores + j, e);
        total += e;
    }
    float all = sum(total), inverse = 1.0f / all;
    for (size j = 0; j < width; j += W) store(scores + j, load(scores + j) * inverse);
    return top + logf(all);
}

/* out [dim] += weights times x: n weights, one every stride, and n rows of x, likewise. */
static inline void add_rows(const float *weights, size stride, const float *x, size row, size n, size dim, float *out) {
    size d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
        vec t0 = load(out + d), t1 = load(out + d + W);
        for (size j = 0; j < n; j++) {
            const float *a = x + j * row + d;
            t0 += weights[j * stride] * load(a), t1 += weights[j * stride] * load(a + W);
        }
        store(out + d, t0), store(out + d + W, t1);
    }
    for (; d < dim; d += W) {
        vec t = load_some(out + d, dim - d);
        for (size j = 0; j < n; j++) t += weights[j * stride] * load_some(x + j * row + d, dim - d);
        store_some(out + d, t, dim - d);
    }
}

/* Attention of packed segments: each row sees its segment's trunk and its own segment up to itself.
 * q [rows, heads, dim], k [rows, kv heads, dim], v [rows, kv heads, value dim]; segments [count]; out [rows, heads, value dim];
 * norm [rows, heads] = log(sum(exp(scores))), for the gradient. longest: keys of the segment with most. Returns 0, or 1 without memory. */
int tree_attention(const float *q, const float *k, const float *v, const Segment *segments, size count, size longest, size heads,
                   size kv_heads, size dim, size value_dim, float scaling, float *out, float *norm, int threads) {
    size shared = heads / kv_heads, wide = up16(longest);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *keys = malloc((size_t)((dim + dim + value_dim + 1) * wide) * sizeof(float));
        float *across = keys + dim * wide, *values = across + dim * wide, *scores = values + value_dim * wide;
#pragma omp for schedule(dynamic, 4)
        for (size task = 0; task < count * kv_heads; task++) {
            const Segment *s = segments + task / kv_heads;
            size head = task % kv_heads, all = s->trunk_length + s->own_length, width = up16(all);
            if (!keys) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            gather(k, s, kv_heads, head, dim, keys);
            transpose(keys, all, dim, width, across);
            gather(v, s, kv_heads, head, value_dim, values);
            for (size i = 0; i < s->own_length; i++)
                for (size h = head * shared; h < (head + 1) * shared; h++) {
                    size at = (s->own + i) * heads + h, n = s->trunk_length + i + 1;
                    float *o = out + at * value_dim;
                    row_times(q + at * dim, across, dim, width, n, scores);
                    norm[at] = softmax(scores, n, scaling);
                    memset(o, 0, (size_t)value_dim * sizeof(float));
                    add_rows(scores, 1, values, value_dim, n, value_dim, o);
                }
        }
        free(keys);
    }
    return failed;
}

/* What the gradient of one segment at one head of keys needs room for; wide is the longest segment's keys, rounded up. */
typedef struct { float *keys, *values, *keys_across, *values_across, *weights, *inner, *grad_keys, *grad_values; } Room;

static float *room(Room *r, size dim, size value_dim, size wide) {
    size sizes[] = {dim, value_dim, dim, value_dim, wide, wide, dim, value_dim}, all = 0;
    for (int i = 0; i < 8; i++) all += sizes[i] * wide;
    float *base = malloc((size_t)all * sizeof(float)), *next = base, **parts[] = {
        &r->keys, &r->values, &r->keys_across, &r->values_across, &r->weights, &r->inner, &r->grad_keys, &r->grad_values};
    for (int i = 0; base && i < 8; next += sizes[i++] * wide) *parts[i] = next;
    return base;
}

/* From the scores and the products of gradient and values, [n] each, of one row: its weights and the gradient of its scores. */
static inline void softmax_gradient(float *weights, float *inner, size n, size width, float scaling, float norm) {
    for (size j = n; j < width; j++) weights[j] = -INFINITY, inner[j] = 0;
    vec total = splat(0);
    for (size j = 0; j < width; j += W) {
        vec p = exponential(load(weights + j) * scaling - norm);
        store(weights + j, p);
        total += p * load(inner + j);
    }
    float mean = sum(total);
    for (size j = 0; j < width; j += W) store(inner + j, load(weights + j) * (load(inner + j) - mean) * scaling);
}

/* Gradients of tree_attention. families [count + 1]: where each trunk's segments begin, itself first; a family is one piece of
 * work, so what its branches add to the trunk's keys is added in order. The gradients are zero before. */
int tree_attention_backward(const float *grad, const float *q, const float *k, const float *v, const float *norm,
                            const Segment *segments, const int64_t *families, size count, size longest, size heads,
                            size kv_heads, size dim, size value_dim, float scaling, float *grad_q, float *grad_k, float *grad_v,
                            int threads) {
    size shared = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        Room r;
        float *base = room(&r, dim, value_dim, up16(longest));
#pragma omp for schedule(dynamic, 1)
        for (size task = 0; task < count * kv_heads; task++) {
            size head = task % kv_heads;
            if (!base) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            for (const Segment *s = segments + families[task / kv_heads]; s < segments + families[task / kv_heads + 1]; s++) {
                size trunk = s->trunk_length, own = s->own_length, all = trunk + own, width = up16(all);
                gather(k, s, kv_heads, head, dim, r.keys);
                transpose(r.keys, all, dim, width, r.keys_across);
                gather(v, s, kv_heads, head, value_dim, r.values);
                transpose(r.values, all, value_dim, width, r.values_across);
                memset(r.grad_keys, 0, (size_t)(all * dim) * sizeof(float));
                memset(r.grad_values, 0, (size_t)(all * value_dim) * sizeof(float));
                for (size h = head * shared; h < (head + 1) * shared; h++) {
                    const float *q_h = q + (s->own * heads + h) * dim, *g_h = grad + (s->own * heads + h) * value_dim;
                    for (size i = 0; i < own; i++) {
                        size at = (s->own + i) * heads + h, n = trunk + i + 1;
                        float *weights = r.weights + i * width, *inner = r.inner + i * width;
                        row_times(q_h + i * heads * dim, r.keys_across, dim, width, n, weights);
                        row_times(g_h + i * heads * value_dim, r.values_across, value_dim, width, n, inner);
                        softmax_gradient(weights, inner, n, width, scaling, norm[at]);
                        add_rows(inner, 1, r.keys, dim, n, dim, grad_q + at * dim);
                    }
                    for (size j = 0; j < all; j++) {
                        size i = j < trunk ? 0 : j - trunk; /* the first row that sees key j */
                        add_rows(r.inner + i * width + j, width, q_h + i * heads * dim, heads * dim, own - i, dim, r.grad_keys + j * dim);
                        add_rows(r.weights + i * width + j, width, g_h + i * heads * value_dim, heads * value_dim, own - i, value_dim,
                                 r.grad_values + j * value_dim);
                    }
                }
                scatter_add(r.grad_keys, s, kv_heads, head, dim, grad_k);
                scatter_add(r.grad_values, s, kv_heads, head, value_dim, grad_v);
            }
        }
        free(base);
    }
    return failed;
}

/* scores [n] = x [n, dim] times a [dim]; folds is room for 4 n. */
static inline void dots(const float *a, const float *x, size n, size dim, float *folds, float *scores) {
    for (size j = 0; j < n; j++, x += dim) {
        vec total = splat(0);
        size d = 0;
        for (; d + W <= dim; d += W) total += load(a + d) * load(x + d);
        if (d < dim) total += load_some(a + d, dim - d) * load_some(x + d, dim - d);
        quarter_vec q = fold(total);
        memcpy(folds + 4 * j, &q, sizeof q);
    }
    for (size j = 0; j < n; j++) scores[j] = (folds[4 * j] + folds[4 * j + 2]) + (folds[4 * j + 1] + folds[4 * j + 3]);
}

/* One store of the cache at one layer: keys [slots, kv heads, capacity, dim] and values likewise. */
typedef struct { float *k, *v; size k_capacity, v_capacity; } Slab;

/* Attention of fed tokens to their row's prompt and to the row's own tokens, themselves included; their keys and values are
 * appended first. Row i has tokens offsets[i] .. offsets[i + 1]; prompt_of, prompt_length, slot and before (own tokens held) [rows].
 * q [tokens, heads, dim], k and v [tokens, kv heads, (value) dim], out [tokens, heads, value dim]. Returns 0, or 1 without memory. */
int cached_attention(const float *q, const float *k, const float *v, const Slab *prompts, const Slab *own, const int64_t *offsets,
                     const int64_t *prompt_of, const int64_t *prompt_length, const int64_t *slot, const int64_t *before, size rows,
                     size longest, size heads, size kv_heads, size dim, size value_dim, float scaling, float *out, int threads) {
    size shared = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && WORTH(rows * heads * dim))
    {
        float *scores = malloc((size_t)(5 * up16(longest)) * sizeof(float)), *folds = scores + up16(longest);
#pragma omp for schedule(static)
        for (size task = 0; task < rows * kv_heads; task++) {
            size row = task / kv_heads, head = task % kv_heads, held = before[row], first = prompt_length[row];
            size a = prompt_of[row] * kv_heads + head, b = slot[row] * kv_heads + head;
            const float *far_k = prompts->k + a * prompts->k_capacity * dim, *far_v = prompts->v + a * prompts->v_capacity * value_dim;
            float *near_k = own->k + b * own->k_capacity * dim, *near_v = own->v + b * own->v_capacity * value_dim;
            if (!scores) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            for (size t = offsets[row]; t < offsets[row + 1]; t++) {
                size at = held + t - offsets[row];
                memcpy(near_k + at * dim, k + (t * kv_heads + head) * dim, (size_t)dim * sizeof(float));
                memcpy(near_v + at * value_dim, v + (t * kv_heads + head) * value_dim, (size_t)value_dim * sizeof(float));
                for (size h = head * shared; h < (head + 1) * shared; h++) {
                    const float *query = q + (t * heads + h) * dim;
                    float *o = out + (t * heads + h) * value_dim;
                    dots(query, far_k, first, dim, folds, scores);
                    dots(query, near_k, at + 1, dim, folds, scores + first);
                    softmax(scores, first + at + 1, scaling);
                    memset(o, 0, (size_t)value_dim * sizeof(float));
                    add_rows(scores, 1, far_v, value_dim, first, value_dim, o);
                    add_rows(scores + first, 1, near_v, value_dim, at + 1, value_dim, o);
                }
            }
        }
        free(scores);
    }
    return failed;
}
