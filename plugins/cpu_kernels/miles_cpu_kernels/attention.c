/* Attention over few keys, in training (packed segments) and in decoding (a cache). */
#include "vector.h"

/* Keys or values that a segment of rows sees: its trunk's, then its own. */
typedef struct { size trunk, trunk_length, own, own_length; } Segment;

static inline size row_of(const Segment *s, size j) { return j < s->trunk_length ? s->trunk + j : s->own + j - s->trunk_length; }
static inline size up(size n) { return (n + W - 1) / W * W; }

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

/* out [n, rounded up] = a [dim] times transposed [dim, width]. Two sums a vector, of every other row: they do not wait for each other. */
static inline void row_times(const float *a, const float *transposed, size dim, size width, size n, float *out) {
    for (size b = 0; b < n; b += 2 * W) {
        const float *p = transposed + b;
        vec t0 = splat(0), t1 = t0, u0 = t0, u1 = t0;
        size d = 0;
        if (b + W < n) {
            for (; d + 2 <= dim; d += 2, p += 2 * width) {
                t0 += a[d] * load(p), t1 += a[d] * load(p + W);
                u0 += a[d + 1] * load(p + width), u1 += a[d + 1] * load(p + width + W);
            }
            if (d < dim) t0 += a[d] * load(p), t1 += a[d] * load(p + W);
            store(out + b + W, t1 + u1);
        } else {
            for (; d + 2 <= dim; d += 2, p += 2 * width) t0 += a[d] * load(p), u0 += a[d + 1] * load(p + width);
            if (d < dim) t0 += a[d] * load(p);
        }
        store(out + b, t0 + u0);
    }
}

/* How a row's scores became weights: exp((score - top) * scaling) * inverse, in this order: a product in front of a difference may be
 * fused with it at one place and not at another, and the gradient needs the very same weights. */
typedef struct { float top, inverse; } Norm;

/* scores [n, rounded up] -> their softmax after scaling, zeros after the n-th. */
static inline Norm softmax(float *scores, size n, float scaling) {
    size width = up(n);
    for (size j = n; j < width; j++) scores[j] = -INFINITY;
    vec best = splat(-INFINITY);
    for (size j = 0; j < width; j += W) {
        vec s = load(scores + j);
        best = pick(s > best, s, best);
    }
    float top = highest(best);
    vec total = splat(0);
    for (size j = 0; j < width; j += W) {
        vec e = exponential((load(scores + j) - top) * scaling);
        store(scores + j, e);
        total += e;
    }
    float inverse = 1.0f / sum(total);
    for (size j = 0; j < width; j += W) store(scores + j, load(scores + j) * inverse);
    return (Norm){top, inverse};
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
 * norms [rows, heads], for the gradient. longest: keys of the segment with most. Returns 0, or 1 without memory. */
int tree_attention(const float *q, const float *k, const float *v, const Segment *segments, size count, size longest, size heads,
                   size kv_heads, size dim, size value_dim, float scaling, float *out, Norm *norms, int threads) {
    size shared = heads / kv_heads, wide = up(longest);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *keys = malloc((size_t)((dim + dim + value_dim + 1) * wide) * sizeof(float));
        float *across = keys + dim * wide, *values = across + dim * wide, *scores = values + value_dim * wide;
#pragma omp for schedule(dynamic, 4)
        for (size task = 0; task < count * kv_heads; task++) {
            const Segment *s = segments + task / kv_heads;
            size head = task % kv_heads, all = s->trunk_length + s->own_length, width = up(all);
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
                    norms[at] = softmax(scores, n, scaling);
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
static inline void softmax_gradient(float *weights, float *inner, size n, size width, float scaling, Norm norm) {
    for (size j = n; j < width; j++) weights[j] = -INFINITY, inner[j] = 0;
    vec total = splat(0);
    for (size j = 0; j < width; j += W) {
        vec p = exponential((load(weights + j) - norm.top) * scaling) * norm.inverse;
        store(weights + j, p);
        total += p * load(inner + j);
    }
    float mean = sum(total);
    for (size j = 0; j < width; j += W) store(inner + j, load(weights + j) * (load(inner + j) - mean) * scaling);
}

/* Gradients of tree_attention. families [count + 1]: where each trunk's segments begin, itself first; a family is one piece of
 * work, so what its branches add to the trunk's keys is added in order. The gradients are zero before. */
int tree_attention_backward(const float *grad, const float *q, const float *k, const float *v, const Norm *norms,
                            const Segment *segments, const int64_t *families, size count, size longest, size heads,
                            size kv_heads, size dim, size value_dim, float scaling, float *grad_q, float *grad_k, float *grad_v,
                            int threads) {
    size shared = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        Room r;
        float *base = room(&r, dim, value_dim, up(longest));
#pragma omp for schedule(dynamic, 1)
        for (size task = 0; task < count * kv_heads; task++) {
            size head = task % kv_heads;
            if (!base) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            for (const Segment *s = segments + families[task / kv_heads]; s < segments + families[task / kv_heads + 1]; s++) {
                size trunk = s->trunk_length, own = s->own_length, all = trunk + own, width = up(all);
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
                        softmax_gradient(weights, inner, n, width, scaling, norms[at]);
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
        quarter q = fold(total);
        memcpy(folds + 4 * j, &q, sizeof q);
    }
    for (size j = 0; j < n; j++) scores[j] = (folds[4 * j] + folds[4 * j + 2]) + (folds[4 * j + 1] + folds[4 * j + 3]);
}

/* One store of the cache at one layer: keys [slots, kv heads, capacity, dim] and values likewise. */
typedef struct { float *k, *v; size k_capacity, v_capacity; } Slab;

static inline void prefetch(const float *p, size n) {
    for (size i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

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
        float *scores = malloc((size_t)(5 * up(longest)) * sizeof(float)), *folds = scores + up(longest);
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
            if (task + 1 < rows * kv_heads) { /* the cache is larger than the processor's, and read here and there */
                size next = (task + 1) / kv_heads, then = (task + 1) % kv_heads;
                size c = slot[next] * kv_heads + then;
                prefetch(own->k + c * own->k_capacity * dim, before[next] * dim);
                prefetch(own->v + c * own->v_capacity * value_dim, before[next] * value_dim);
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
