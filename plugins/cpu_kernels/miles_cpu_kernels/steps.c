/* Steps of a layer that PyTorch has only as several operations on a CPU; each is one pass over its rows here. */
#include "vector.h"

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

/* index [rows, k] names the expert of each choice. The choices sorted by expert, in order within one: order [rows k] and its
 * inverse place, row = order / k; counts [experts], and ends, where each expert's choices end. Returns 1 for a choice that is none. */
int sort_choices(const int64_t *index, int64_t *order, int64_t *place, int64_t *row, int64_t *counts, int32_t *ends, size rows,
                 size k, size experts) {
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

/* The highest logit of a row and the logarithm of the sum of exp(logit - top): apart, as their sum is rounded to what top is. */
typedef struct { float top, log_sum; } LogNorm;

/* out [rows] = log softmax(logits [rows, vocabulary])[token]; norms [rows]: see there. Returns 1 for a token that is none. */
int log_probs(const float *logits, const int64_t *tokens, float *out, LogNorm *norms, size rows, size vocabulary, int threads) {
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
        norms[r] = (LogNorm){top, logf(sum(total) + rest)};
        out[r] = x[tokens[r]] - top - norms[r].log_sum;
    }
    return 0;
}

/* grad_logits = grad * (one at the token - softmax(logits)). */
void log_probs_backward(const float *grad, const float *logits, const int64_t *tokens, const LogNorm *norms, float *grad_logits,
                        size rows, size vocabulary, int threads) {
    PARALLEL(rows * vocabulary)
    for (size r = 0; r < rows; r++) {
        const float *x = logits + r * vocabulary;
        float *o = grad_logits + r * vocabulary, top = norms[r].top, log_sum = norms[r].log_sum;
        size i = 0;
        for (; i + W <= vocabulary; i += W) store(o + i, exponential(load(x + i) - top - log_sum) * -grad[r]);
        if (i < vocabulary) store_some(o + i, exponential(load_some(x + i, vocabulary - i) - top - log_sum) * -grad[r], vocabulary - i);
        o[tokens[r]] += grad[r];
    }
}

