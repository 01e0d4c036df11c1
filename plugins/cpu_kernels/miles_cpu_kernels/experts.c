/* The usual expert, down(silu(gate) * up), of weights that fit into a core's cache: its products and what is between them, a few
 * rows at a time.
 *
 * A tile of ROWS x COLS vectors of the result stays in registers while the inner dimension passes (Goto and van de Geijn 2008).
 * The right side is packed: columns in panels of PANEL, each panel [inner, PANEL].
 */
#include "vector.h"

enum { ROWS = 6, COLS = 2, PANEL = COLS * W };

static inline size panels(size columns) { return (columns + PANEL - 1) / PANEL; }
static inline size packed_size(size inner, size columns) { return panels(columns) * PANEL * inner; }

/* One panel of b, [inner, columns] or transposed [columns, inner], zeros after the last column. */
static void pack_panel(const float *b, int transposed, size inner, size columns, size panel, float *out) {
    size first = panel * PANEL, n = columns - first < PANEL ? columns - first : PANEL;
    out += panel * PANEL * inner;
    for (size i = 0; i < inner; i++, out += PANEL) {
        if (transposed)
            for (size j = 0; j < n; j++) out[j] = b[(first + j) * inner + i];
        else
            memcpy(out, b + i * columns + first, (size_t)n * sizeof(float));
        for (size j = n; j < PANEL; j++) out[j] = 0;
    }
}
static void pack(const float *b, int transposed, size inner, size columns, float *out) {
    for (size p = 0; p < panels(columns); p++) pack_panel(b, transposed, inner, columns, p, out);
}

static inline void put(vec tile[ROWS][COLS], size rows, size columns, float *out, size stride) {
    for (size r = 0; r < rows; r++) {
        if (columns == PANEL)
            for (int c = 0; c < COLS; c++) store(out + r * stride + c * W, tile[r][c]);
        else {
            float line[PANEL];
            for (int c = 0; c < COLS; c++) store(line + c * W, tile[r][c]);
            memcpy(out + r * stride, line, (size_t)columns * sizeof(float));
        }
    }
}

/* out [rows (at most ROWS), columns] = the rows that a points to, [inner] each and ROWS of them, times packed. */
static inline void times_packed(const float *const *a, const float *packed, size inner, size columns, float *out, size stride, size rows) {
    for (size p = 0; p < panels(columns); p++, packed += PANEL * inner) {
        const float *b = packed, *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3], *a4 = a[4], *a5 = a[5];
        vec t[ROWS][COLS] = {{{0}}};
        for (size i = 0; i < inner; i++, b += PANEL) {
            vec x = load(b), y = load(b + W);
            t[0][0] += a0[i] * x, t[0][1] += a0[i] * y;
            t[1][0] += a1[i] * x, t[1][1] += a1[i] * y;
            t[2][0] += a2[i] * x, t[2][1] += a2[i] * y;
            t[3][0] += a3[i] * x, t[3][1] += a3[i] * y;
            t[4][0] += a4[i] * x, t[4][1] += a4[i] * y;
            t[5][0] += a5[i] * x, t[5][1] += a5[i] * y;
        }
        size left = columns - p * PANEL;
        put(t, rows, left < PANEL ? left : PANEL, out + p * PANEL, stride);
    }
}

/* Pointers to rows first .. of x [.., stride], through index unless it is null; the last one again where there are fewer than ROWS. */
static inline void point(const float **a, const float *x, size stride, const int64_t *index, size first, size rows) {
    for (size r = 0; r < ROWS; r++) {
        size at = first + (r < rows ? r : rows - 1);
        a[r] = x + (index ? index[at] : at) * stride;
    }
}

/* The usual expert, down(silu(gate) * up), of every choice: hidden [.., dim] is read through row [places], sorted by expert up to
 * ends [experts]; gate_up [experts, 2 inner, dim], down [experts, dim, inner]; product [places, 2 inner] is kept unless it is null;
 * y [places, dim]. Returns 1 without memory. */
int experts(const float *hidden, const int64_t *row, const int32_t *ends, const float *gate_up, const float *down, float *product,
            float *y, size count, size dim, size inner, int threads) {
    size places = ends[count - 1], first_size = packed_size(dim, 2 * inner), second_size = packed_size(inner, dim);
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && WORTH(places * inner))
    for (int thread = 0; thread < threads; thread++) {
        size from = places * thread / threads, to = places * (thread + 1) / threads;
        float *first = scratch(first_size + second_size + 3 * ROWS * inner), *second = first + first_size;
        float *own = second + second_size, *h = own + 2 * ROWS * inner;
        for (size e = 0; first && e < count; e++) {
            size start = e ? ends[e - 1] : 0, end = ends[e] < to ? ends[e] : to;
            if (start < from) start = from;
            if (start >= end) continue;
            pack(gate_up + e * 2 * inner * dim, 1, dim, 2 * inner, first);
            pack(down + e * dim * inner, 1, inner, dim, second);
            for (size p = start; p < end; p += ROWS) {
                size n = end - p < ROWS ? end - p : ROWS;
                float *tile = product ? product + p * 2 * inner : own;
                const float *a[ROWS];
                point(a, hidden, dim, row, p, n);
                times_packed(a, first, dim, 2 * inner, tile, 2 * inner, n);
                for (size r = 0; r < n; r++) gate(tile + r * 2 * inner, h + r * inner, inner);
                point(a, h, inner, NULL, 0, n);
                times_packed(a, second, inner, dim, y + p * dim, dim, n);
            }
        }
        if (!first) {
#pragma omp atomic write
            failed = 1;
        }
    }
    return failed;
}

/* What goes back through the experts: grad [.., dim], of the sums over choices, is read through row; scale [places] is each choice's
 * weight. scaled [places, inner] = h * scale, grad_product [places, 2 inner], grad_scale [places], grad_x [places, dim].
 * Returns 1 without memory. */
int experts_backward(const float *grad, const int64_t *row, const int32_t *ends, const float *gate_up, const float *down,
                     const float *product, const float *scale, float *scaled, float *grad_product, float *grad_scale, float *grad_x,
                     size count, size dim, size inner, int threads) {
    size places = ends[count - 1], first_size = packed_size(dim, inner), second_size = packed_size(2 * inner, dim);
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && WORTH(places * inner))
    for (int thread = 0; thread < threads; thread++) {
        size from = places * thread / threads, to = places * (thread + 1) / threads;
        float *first = scratch(first_size + second_size + ROWS * inner), *second = first + first_size, *grad_h = second + second_size;
        for (size e = 0; first && e < count; e++) {
            size start = e ? ends[e - 1] : 0, end = ends[e] < to ? ends[e] : to;
            if (start < from) start = from;
            if (start >= end) continue;
            pack(down + e * dim * inner, 0, dim, inner, first);
            pack(gate_up + e * 2 * inner * dim, 0, 2 * inner, dim, second);
            for (size p = start; p < end; p += ROWS) {
                size n = end - p < ROWS ? end - p : ROWS;
                const float *a[ROWS];
                point(a, grad, dim, row, p, n);
                times_packed(a, first, dim, inner, grad_h, inner, n);
                for (size r = 0; r < n; r++)
                    grad_scale[p + r] = gate_backward(product + (p + r) * 2 * inner, grad_h + r * inner, scale[p + r],
                                                      scaled + (p + r) * inner, grad_product + (p + r) * 2 * inner, inner);
                point(a, grad_product, 2 * inner, NULL, p, n);
                times_packed(a, second, 2 * inner, dim, grad_x + p * dim, dim, n);
            }
        }
        if (!first) {
#pragma omp atomic write
            failed = 1;
        }
    }
    return failed;
}
