/* Linear layers over weights packed in blocks of COLUMNS outputs. Every output is one sum in order of the inputs, whatever
   the number of rows and threads: the same bits alone and in a batch. The weights of a block are read once from memory and
   serve all rows; what happens to a finished block of outputs (stored, added to the residual, gated) is the caller's word. */
enum { VECTORS = COLUMNS / VL, MAX_ROWS = VL == 16 ? 12 : VL == 8 ? 3 : 2, ROW_CHUNK = 96, AHEAD = 4096 };
enum { STORE, ADD, GATE, LOGITS };

/* One block for `rows` rows of x, while the weights `ahead` bytes further on are fetched, a line or two each time. */
INLINE void product(const int rows, const char *w, const char *x, int64_t x_stride, int64_t inputs, const char *ahead, int64_t pace,
                    float *out, const int dtype) {
    vf acc[MAX_ROWS][VECTORS] = {0};
    for (int64_t k = 0; k < (dtype == BF16 ? inputs / 2 : inputs); k++, w += COLUMNS * 4, x += 4, ahead += pace) {
        vu weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = uload(w + v * VL * 4);
        FETCH(ahead);
        if (pace > 64) FETCH(ahead + 64);
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride, 4);
            if (dtype == F32) {
                float a;
                memcpy(&a, &pair, 4);
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] += a * (vf)weights[v];
            } else {
#ifdef __AVX512BF16__
                UNROLL for (int v = 0; v < VECTORS; v++)
                    acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights[v]);
#else
                float a = up((u16)pair), b = up((u16)(pair >> 16));
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    acc[r][v] += a * (vf)(weights[v] << 16);
                    acc[r][v] += b * (vf)(weights[v] & 0xffff0000u);
                }
#endif
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) vstore(out + r * COLUMNS + v * VL, acc[r][v]);
}

#define SIGNATURE const char *w, const char *x, int64_t stride, int64_t inputs, const char *ahead, int64_t pace, float *out
#define PRODUCT(n) \
    static __attribute__((noinline)) void product_bf16_##n(SIGNATURE) { product(n, w, x, stride, inputs, ahead, pace, out, BF16); } \
    static __attribute__((noinline)) void product_f32_##n(SIGNATURE) { product(n, w, x, stride, inputs, ahead, pace, out, F32); }
typedef void (*Product)(SIGNATURE);
PRODUCT(1) PRODUCT(2)
#if defined(__AVX512F__)
PRODUCT(3) PRODUCT(4) PRODUCT(5) PRODUCT(6) PRODUCT(7) PRODUCT(8) PRODUCT(9) PRODUCT(10) PRODUCT(11) PRODUCT(12)
#define ALL(d) product_##d##_1, product_##d##_2, product_##d##_3, product_##d##_4, product_##d##_5, product_##d##_6, \
               product_##d##_7, product_##d##_8, product_##d##_9, product_##d##_10, product_##d##_11, product_##d##_12
#elif defined(__AVX2__)
PRODUCT(3)
#define ALL(d) product_##d##_1, product_##d##_2, product_##d##_3
#else
#define ALL(d) product_##d##_1, product_##d##_2
#endif
static const Product products[2][MAX_ROWS] = {{ALL(bf16)}, {ALL(f32)}};

/* One row's finished outputs [column, column + n) of a block. */
INLINE void finish_row(float *y, const float *bias, int64_t column, int64_t n, int kind, void *out, int64_t row, int64_t outputs, int dtype) {
    if (bias) for (int64_t i = 0; i < n; i++) y[i] += bias[column + i];
    if (kind == STORE) {
        if (dtype == BF16) for (int64_t i = 0; i < n; i++) ((u16 *)out)[row * outputs + column + i] = down(y[i]);
        else memcpy((float *)out + row * outputs + column, y, n * sizeof(float));
    } else if (kind == LOGITS) {
        memcpy((float *)out + row * outputs + column, y, n * sizeof(float));
    } else if (kind == ADD) {
        float *to = (float *)out + row * outputs + column;
        for (int64_t i = 0; i < n; i++) to[i] += y[i];
    } else { /* silu(gate) * up; half as many outputs */
        int64_t at = row * (outputs / 2) + column / 2;
        float gated[COLUMNS / 2];
        UNROLL for (int i = 0; i < COLUMNS / 2; i += VL) {
            vf gate = vload(y + i), value = vload(y + COLUMNS / 2 + i);
            vstore(gated + i, gate / (1.0f + vexp(-gate)) * value);
        }
        for (int i = 0; i < COLUMNS / 2; i++) put(out, at + i, gated[i], dtype);
    }
}

/* Called by every thread of a team. x: (rows, inputs). */
static void linear_team(const Member *member, const Linear *l, const void *x, int64_t rows, int dtype, int kind, void *out) {
    int64_t blocks = ceil_div(l->outputs, COLUMNS), chunks = ceil_div(rows, ROW_CHUNK), x_stride = l->inputs * width(dtype);
    FOR_TEAM(member, item, blocks * chunks) {
        int64_t block = item / chunks, first = item % chunks * ROW_CHUNK, last = min64(first + ROW_CHUNK, rows), n;
        const char *w = (const char *)l->weight + block * COLUMNS * x_stride, *next = w + COLUMNS * x_stride, *ahead = w + AHEAD;
        int64_t pace = last - first > MAX_ROWS ? 64 : 128; /* all of it in one pass, or half of the next block in each of two */
        if (pace == 64) ahead = next;
        for (int64_t row = first; row < last; row += n, ahead += COLUMNS * x_stride / 2) {
            n = ceil_div(last - row, ceil_div(last - row, MAX_ROWS)); /* 32 rows as 11, 11, 10 */
            float y[MAX_ROWS * COLUMNS];
            products[dtype][n - 1](w, (const char *)x + row * x_stride, x_stride, l->inputs, ahead, pace, y);
            for (int64_t r = 0; r < n; r++)
                finish_row(y + r * COLUMNS, l->bias, block * COLUMNS, min64(COLUMNS, l->outputs - block * COLUMNS), kind, out, row + r, l->outputs, dtype);
        }
    }
    wait_for_team(member);
}

static void linear(const Linear *l, const void *x, int64_t rows, int64_t dtype, void *out) {
    Team team = {0};
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team);
        linear_team(&member, l, x, rows, dtype, STORE, out);
    }
}
