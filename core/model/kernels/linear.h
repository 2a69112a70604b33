/* Linear layers over weights packed in blocks of COLUMNS outputs. Every output is one sum in order of the inputs, whatever
   the number of rows and threads (and exact, in integers): the same bits alone and in a batch. The weights of a block are
   read once from memory and serve all rows; what happens to a finished block of outputs (stored, added to the residual,
   gated) is the caller's word. */
enum { VECTORS = COLUMNS / VL, MAX_ROWS = VL == 16 ? 12 : VL == 8 ? 3 : 2, ROW_CHUNK = 96, AHEAD = 4096 };
enum { STORE, ADD, GATE, LOGITS };

INLINE int64_t padded(int64_t inputs) { return ceil_div(inputs, GROUP_INPUTS) * GROUP_INPUTS; }

INLINE int64_t block_bytes(const Linear *l) {
    return l->kind == BF16 ? COLUMNS * 2 * l->inputs : l->kind == F32 ? COLUMNS * 4 * l->inputs
         : l->kind == INT8 ? COLUMNS * padded(l->inputs) : COLUMNS / 2 * padded(l->inputs);
}

/* Of one row of x, as the layer reads it: quantized, its bytes are followed by its scale. */
INLINE int64_t row_bytes(const Linear *l) { return l->kind < INT8 ? l->inputs * width(l->kind) : padded(l->inputs) + (int64_t)sizeof(float); }

/* x as whole numbers from -127 to 127 times one scale: max|x| / 127, or NaN where x is not finite. 128 is added to them. */
static void quantize_x(const void *x, int64_t n, int dtype, char *out) {
    vf top = {0}, poison = {0};
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = get_vector(x, i, dtype);
        top = vmax((vf)((vi)v & 0x7fffffff), top);
        poison += v * 0.0f;
    }
    float most = lane_max(top), scale, rest = lane_sum(poison);
    for (; i < n; i++) {
        most = fabsf(get(x, i, dtype)) > most ? fabsf(get(x, i, dtype)) : most;
        rest += get(x, i, dtype) * 0.0f;
    }
    scale = most / 127.0f + rest;
    float inverse = most > 0 && rest == 0 ? 127.0f / most : 0;
    for (i = 0; i < padded(n); i += VL) {
        float last[VL] = {0};
        if (i + VL > n) for (int64_t j = i; j < n; j++) last[j - i] = get(x, j, dtype);
        bytes b = __builtin_convertvector((vu)(to_nearest((i + VL > n ? vload(last) : get_vector(x, i, dtype)) * inverse) + 128), bytes);
        memcpy(out + i, &b, sizeof b);
    }
    memcpy(out + padded(n), &scale, sizeof scale);
}

/* One group of 4-bit weights of a block as bytes, in the order of 8-bit ones. */
INLINE void as_bytes(const char *w, const char *groups, char *tile) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        halves h;
        memcpy(&h, groups + v * sizeof h, sizeof h);
        vu group = __builtin_convertvector(h, vu), step = group & 255, minimum = group >> 8;
        step |= step << 16;
        minimum |= minimum << 8;
        minimum |= minimum << 16;
        UNROLL for (int i = 0; i < GROUP_INPUTS / 8; i++) {
            vu both = uload(w + i * COLUMNS * 4 + v * VL * 4), low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
            vb a = (vb)((vs)low * (vs)step) + (vb)minimum, b = (vb)((vs)high * (vs)step) + (vb)minimum; /* products stay below 256 */
            memcpy(tile + (2 * i) * COLUMNS * 4 + v * VL * 4, &a, sizeof a);
            memcpy(tile + (2 * i + 1) * COLUMNS * 4 + v * VL * 4, &b, sizeof b);
        }
    }
}

/* One block for `rows` rows of x, while the weights `ahead` bytes further on are fetched, a line or two each time. */
INLINE void product(const int rows, const Linear *l, int64_t block, const char *x, int64_t x_stride, const char *ahead, int64_t pace,
                    float *out, const int kind) {
    const char *w = (const char *)l->weight + block * block_bytes(l), *groups = (const char *)l->groups + block * padded(l->inputs) * 2;
    int64_t steps = kind == BF16 ? l->inputs / 2 : kind == F32 ? l->inputs : padded(l->inputs) / 4, at_once = kind == INT4 ? GROUP_INPUTS / 4 : steps;
    char tile[GROUP_INPUTS * COLUMNS] __attribute__((aligned(64)));
    vf acc[MAX_ROWS][VECTORS] = {0};
    vi whole[MAX_ROWS][VECTORS];
    if (kind >= INT8) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) whole[r][v] = (vi)uload(l->offset + block * COLUMNS + v * VL);
    if (kind == INT4) pace /= 2;
    for (; steps > 0; steps -= at_once, w += GROUP_INPUTS / 2 * COLUMNS, groups += COLUMNS * 2) {
        const char *from = w;
        if (kind == INT4) {
            as_bytes(w, groups, tile);
            from = tile;
        }
        for (int64_t k = 0; k < at_once; k++, from += COLUMNS * 4, x += 4, ahead += pace) {
            vu weights[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = uload(from + v * VL * 4);
            FETCH(ahead);
            if (pace > 64) FETCH(ahead + 64);
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t word;
                memcpy(&word, x + r * x_stride, 4);
                if (kind >= INT8) {
                    UNROLL for (int v = 0; v < VECTORS; v++) whole[r][v] = dot_bytes(whole[r][v], word, (vi)weights[v]);
                } else if (kind == F32) {
                    float a;
                    memcpy(&a, &word, 4);
                    UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] += a * (vf)weights[v];
                } else {
#ifdef __AVX512BF16__
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)_mm512_set1_epi32(word), (__m512bh)weights[v]);
#else
                    float a = up((u16)word), b = up((u16)(word >> 16));
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        acc[r][v] += a * (vf)(weights[v] << 16);
                        acc[r][v] += b * (vf)(weights[v] & 0xffff0000u);
                    }
#endif
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float scale = 1;
        if (kind >= INT8) memcpy(&scale, x + r * x_stride, 4);
        UNROLL for (int v = 0; v < VECTORS; v++)
            vstore(out + r * COLUMNS + v * VL, kind < INT8 ? acc[r][v] : __builtin_convertvector(whole[r][v], vf) * scale * vload(l->scale + block * COLUMNS + v * VL));
    }
}

#define SIGNATURE const Linear *l, int64_t block, const char *x, int64_t stride, const char *ahead, int64_t pace, float *out
#define PRODUCT_OF(n, name, kind) \
    static __attribute__((noinline)) void product_##name##_##n(SIGNATURE) { product(n, l, block, x, stride, ahead, pace, out, kind); }
#define PRODUCT(n) PRODUCT_OF(n, bf16, BF16) PRODUCT_OF(n, f32, F32) PRODUCT_OF(n, int8, INT8) PRODUCT_OF(n, int4, INT4)
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
static const Product products[4][MAX_ROWS] = {{ALL(bf16)}, {ALL(f32)}, {ALL(int8)}, {ALL(int4)}};

/* One row's finished outputs [column, column + n) of a block. */
INLINE void finish_row(float *y, const float *bias, int64_t column, int64_t n, int kind, void *out, int64_t row, int64_t outputs, int dtype) {
    if (bias) for (int64_t i = 0; i < n; i++) y[i] += bias[column + i];
    int64_t at = row * outputs + column, i = 0;
    if (kind == ADD) {
        float *to = (float *)out + at;
        for (; i + VL <= n; i += VL) vstore(to + i, vload(to + i) + vload(y + i));
        for (; i < n; i++) to[i] += y[i];
    } else if (kind == GATE) { /* silu(gate) * up; half as many outputs */
        UNROLL for (; i < COLUMNS / 2; i += VL) {
            vf gate = vload(y + i), value = vload(y + COLUMNS / 2 + i);
            put_vector(out, at / 2 + i, gate / (1.0f + vexp(-gate)) * value, dtype);
        }
    } else {
        if (kind == LOGITS) dtype = F32;
        for (; i + VL <= n; i += VL) put_vector(out, at + i, vload(y + i), dtype);
        for (; i < n; i++) put(out, at + i, y[i], dtype);
    }
}

/* Called by every thread of a team. x: (rows, inputs) as the layer reads them; the outputs are of `dtype` where they are stored. */
static void linear_team(const Member *member, const Linear *l, const void *x, int64_t rows, int dtype, int kind, void *out) {
    int64_t blocks = ceil_div(l->outputs, COLUMNS), chunks = ceil_div(rows, ROW_CHUNK), x_stride = row_bytes(l), size = block_bytes(l);
    FOR_TEAM(member, item, blocks * chunks) {
        int64_t block = item / chunks, first = item % chunks * ROW_CHUNK, last = min64(first + ROW_CHUNK, rows), n;
        const char *w = (const char *)l->weight + block * size, *next = w + size, *ahead = w + AHEAD;
        int64_t pace = last - first > MAX_ROWS ? 64 : 128; /* all of it in one pass, or half of the next block in each of two */
        if (pace == 64) ahead = next;
        for (int64_t row = first; row < last; row += n, ahead += size / 2) {
            n = ceil_div(last - row, ceil_div(last - row, MAX_ROWS)); /* 32 rows as 11, 11, 10 */
            float y[MAX_ROWS * COLUMNS];
            products[l->kind][n - 1](l, block, (const char *)x + row * x_stride, x_stride, ahead, pace, y);
            for (int64_t r = 0; r < n; r++)
                finish_row(y + r * COLUMNS, l->bias, block * COLUMNS, min64(COLUMNS, l->outputs - block * COLUMNS), kind, out, row + r, l->outputs, dtype);
        }
    }
    wait_for_team(member);
}

/* Rows of `dtype` as layer l reads them: as they are, or quantized into `room`. */
static const void *rows_for(const Member *member, const Linear *l, const void *x, int64_t rows, int dtype, char *room) {
    if (l->kind < INT8) return x;
    FOR_TEAM(member, r, rows) quantize_x((const char *)x + r * l->inputs * width(dtype), l->inputs, dtype, room + r * row_bytes(l));
    wait_for_team(member);
    return room;
}

static void linear(const Linear *l, const void *x, int64_t rows, int64_t dtype, void *out) {
    Team team = {0};
    char *room = l->kind < INT8 ? 0 : malloc(rows * row_bytes(l));
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team);
        linear_team(&member, l, rows_for(&member, l, x, rows, dtype, room), rows, dtype, STORE, out);
    }
    free(room);
}
