/* Linear layers over weights packed in blocks of COLUMNS outputs. Every output is one sum in order of the inputs, whatever
   the number of rows and threads (and exact, in integers): the same bits alone and in a batch. The weights of a block are
   read once from memory and serve all rows; what happens to a finished block of outputs (stored, added to the residual,
   gated) is the caller's word. */
enum { VECTORS = COLUMNS / VL, MAX_ROWS = VL == 16 ? 12 : VL == 8 ? 3 : 2, MOST_ROWS = 32, ROW_CHUNK = 96, AHEAD = 4096 };
enum { STORE, ADD, GATE, LOGITS };
#define STAY_IN_MEMORY __asm__ volatile("" ::: "memory")

INLINE int64_t padded(int64_t inputs) { return ceil_div(inputs, SHIFT_INPUTS) * SHIFT_INPUTS; }

INLINE int64_t block_bytes(const Linear *l) {
    return l->kind == BF16 ? COLUMNS * 2 * l->inputs : l->kind == F32 ? COLUMNS * 4 * l->inputs
         : l->kind == INT8 ? COLUMNS * padded(l->inputs) : COLUMNS / 2 * padded(l->inputs);
}

/* Of one row of x, as the layer reads it: bytes are followed by a shift for each group of them, a scale and a correction;
   for tiles by the low bytes instead, as the high ones are shifted already. */
INLINE int64_t row_bytes(const Linear *l) {
    if (l->kind < INT8) return l->inputs * width(l->kind);
#ifdef __AMX_INT8__
    return 2 * padded(l->inputs) + LINE;
#endif
    return padded(l->inputs) + (padded(l->inputs) / SHIFT_INPUTS + 2) * 4;
}

/* x in block floating point: whole numbers from -127 to 127, times a power of two for each group of inputs, times one scale.
   The largest |x| takes the largest exponent. It is few enough, `top`, for every sum of products to fit 32 bits:
   as x = integer * 2^shift * scale, its group's sums are to be shifted by 0 to `top`. The scale is NaN where x is not finite.
   Weights are read as w + 128: the correction is what the 128 add to every output's sum. */
static void quantize_x(const void *x, int64_t n, int dtype, char *out) {
#ifdef __AMX_INT8__
    char shifts[4096 * 4], *end = out + 2 * padded(n);
#else
    char *shifts = out + padded(n), *end = shifts + padded(n) / SHIFT_INPUTS * 4;
#endif
    float tail[SHIFT_INPUTS] = {0}, most = 0, scale;
    int32_t most_bits, bits, top = 8;
    vf poison = {0};
    while (top > 0 && (16129 * n) << top >= (int64_t)1 << 31) top--;
    widen(x, n / SHIFT_INPUTS * SHIFT_INPUTS, n % SHIFT_INPUTS, dtype, tail);
    for (int64_t i = 0; i < padded(n); i += SHIFT_INPUTS) {
        int is_tail = i + SHIFT_INPUTS > n;
        vf largest = {0};
        UNROLL for (int j = 0; j < SHIFT_INPUTS; j += VL) {
            vf v = is_tail ? vload(tail + j) : get_vector(x, i + j, dtype);
            largest = vmax((vf)((vi)v & 0x7fffffff), largest);
            poison += v * 0.0f;
        }
        float m = lane_max(largest);
        most = m > most ? m : most;
        memcpy(shifts + i / SHIFT_INPUTS * 4, &m, 4);
    }
    float rest = lane_sum(poison), inverse = most > 1e-30f && rest == 0 ? 127.0f / most : 0;
    vu sum = {0};
    memcpy(&most_bits, &most, 4);
    for (int64_t i = 0; i < padded(n); i += SHIFT_INPUTS) {
        memcpy(&bits, shifts + i / SHIFT_INPUTS * 4, 4);
        int32_t below = (most_bits - bits) >> 23, exponent = below < top ? below : top, shift = top - exponent; /* most >= 2^below * m */
        float factor = inverse * (float)(1 << exponent);
        memcpy(shifts + i / SHIFT_INPUTS * 4, &shift, 4);
        UNROLL for (int j = 0; j < SHIFT_INPUTS; j += VL) {
            vi whole = to_nearest((i + SHIFT_INPUTS > n ? vload(tail + j) : get_vector(x, i + j, dtype)) * factor);
#ifdef __AMX_INT8__
            vi shifted = whole << shift;
            bytes b = __builtin_convertvector((vu)(shifted >> 8), bytes), low = __builtin_convertvector((vu)shifted, bytes);
            memcpy(out + padded(n) + i + j, &low, sizeof low);
#else
            bytes b = __builtin_convertvector((vu)whole, bytes);
#endif
            memcpy(out + i + j, &b, sizeof b);
            sum += (vu)whole << shift;
        }
    }
    uint32_t correction = 0;
    UNROLL for (int i = 0; i < VL; i++) correction += sum[i] * 128;
    scale = most / 127.0f / (float)(1 << top) + rest;
    memcpy(end, &scale, 4);
    memcpy(end + 4, &correction, 4);
}

/* SHIFT_INPUTS 4-bit weights of a block as bytes, in the order of 8-bit ones; returns where the next are. */
INLINE const char *as_bytes(const char *w, const char **groups, char *tile) {
    for (int64_t g = 0; g < SHIFT_INPUTS; g += GROUP_INPUTS, w += GROUP_INPUTS / 2 * COLUMNS, *groups += COLUMNS * 2, tile += GROUP_INPUTS * COLUMNS)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            halves h;
            memcpy(&h, *groups + v * sizeof h, sizeof h);
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
    return w;
}

/* A word of each of `rows` rows of x times a word of each output's weights, onto the sums; a line or two of memory is fetched. */
INLINE void add_products(vf acc[MAX_ROWS][VECTORS], const int rows, const char *w, const char *x, int64_t x_stride, const char *ahead, int64_t pace, const int kind) {
    vu weights[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = uload(w + v * VL * 4);
    FETCH(ahead);
    if (pace > 64) FETCH(ahead + 64);
    UNROLL for (int r = 0; r < rows; r++) {
        uint32_t word;
        memcpy(&word, x + r * x_stride, 4);
        if (kind >= INT8) {
            UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = (vf)dot_bytes((vi)acc[r][v], weights[v], (vi)words(word));
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

/* One block, whose weights are at w, for `rows` rows of x, while the weights `ahead` bytes further on are fetched. */
INLINE void product(const int rows, const Linear *l, int64_t block, const char *w, const char *x, int64_t x_stride, const char *ahead,
                    int64_t pace, float *out, const int kind) {
    vf acc[MAX_ROWS][VECTORS] = {0};
    int64_t steps = kind == BF16 ? l->inputs / 2 : l->inputs;
    for (int64_t k = 0; k < steps; k++, w += COLUMNS * 4, x += 4, ahead += pace) add_products(acc, rows, w, x, x_stride, ahead, pace, kind);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) vstore(out + r * COLUMNS + v * VL, acc[r][v]);
}

/* The same in whole numbers: each group of inputs has sums of its own, which are shifted onto those in `out`. */
INLINE void whole_product(const int rows, const Linear *l, int64_t block, const char *w, const char *x, int64_t x_stride, const char *ahead,
                          int64_t pace, float *out, const int kind) {
    int64_t n = padded(l->inputs);
    const char *groups = (const char *)l->groups + block * n * 2, *shifts = x + n, *end = shifts + n / SHIFT_INPUTS * 4;
    char tile[SHIFT_INPUTS * COLUMNS] __attribute__((aligned(LINE)));
    memset(out, 0, rows * COLUMNS * sizeof(float));
    for (; shifts < end; shifts += 4) {
        vf acc[MAX_ROWS][VECTORS] = {0};
        const char *from = w;
        if (kind == INT4) {
            w = as_bytes(w, &groups, tile);
            from = tile;
        } else w += SHIFT_INPUTS * COLUMNS;
        UNROLL for (int k = 0; k < SHIFT_INPUTS / 4; k++, from += COLUMNS * 4, x += 4, ahead += pace) /* a loop would move registers about */
            add_products(acc, rows, from, x, x_stride, ahead, pace, kind);
        STAY_IN_MEMORY; /* the sums in `out`, or the registers would not do */
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t shift;
            memcpy(&shift, shifts + r * x_stride, 4);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                float *to = out + r * COLUMNS + v * VL;
                vstore(to, (vf)(uload(to) + ((vu)acc[r][v] << shift)));
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float scale;
        uint32_t correction;
        memcpy(&scale, end + r * x_stride, 4);
        memcpy(&correction, end + r * x_stride + 4, 4);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float *to = out + r * COLUMNS + v * VL;
            vstore(to, __builtin_convertvector((vi)(uload(to) - correction), vf) * scale * vload(l->scale + block * COLUMNS + v * VL));
        }
    }
}

#ifdef __AMX_INT8__
/* The same for up to 16 rows in tiles: the sums of the high bytes and those of the low ones. */
static __attribute__((noinline)) void whole_tile_product(int64_t rows, const Linear *l, int64_t block, const char *w, const char *x, int64_t x_stride,
                                                         const char *ahead, int64_t pace, float *out, int kind) {
    int64_t n = padded(l->inputs);
    const char *groups = (const char *)l->groups + block * n * 2, *end = x + 2 * n;
    char tile[SHIFT_INPUTS * COLUMNS] __attribute__((aligned(LINE)));
    float low[TILE_ROWS * COLUMNS];
    shape_tiles(rows, rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < n; k += SHIFT_INPUTS, x += SHIFT_INPUTS, ahead += TILE_ROWS * pace) {
        if (kind == INT4) w = as_bytes(w, &groups, tile);
        add_tiles_of_bytes(kind == INT4 ? tile : w, x, x_stride, n);
        if (kind == INT8) w += SHIFT_INPUTS * COLUMNS;
        fetch_lines(ahead, TILE_ROWS * pace);
    }
    _tile_stored(0, out, COLUMNS * 4);
    _tile_stored(1, out + TILE_ROWS, COLUMNS * 4);
    _tile_stored(2, low, COLUMNS * 4);
    _tile_stored(3, low + TILE_ROWS, COLUMNS * 4);
    for (int64_t r = 0; r < rows; r++) {
        float scale;
        uint32_t correction;
        memcpy(&scale, end + r * x_stride, 4);
        memcpy(&correction, end + r * x_stride + 4, 4);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float *to = out + r * COLUMNS + v * VL;
            vu sum = (uload(to) << 8) + uload(low + r * COLUMNS + v * VL) - correction;
            vstore(to, __builtin_convertvector((vi)sum, vf) * scale * vload(l->scale + block * COLUMNS + v * VL));
        }
    }
}
#endif

#define SIGNATURE const Linear *l, int64_t block, const char *w, const char *x, int64_t stride, const char *ahead, int64_t pace, float *out
#define PRODUCT_OF(n, of, name, kind) \
    static __attribute__((noinline)) void product_##name##_##n(SIGNATURE) { of(n, l, block, w, x, stride, ahead, pace, out, kind); }
#ifdef __AMX_INT8__ /* which leaves no bytes to these */
#define PRODUCT(n) PRODUCT_OF(n, product, bf16, BF16) PRODUCT_OF(n, product, f32, F32)
#else
#define PRODUCT(n) \
    PRODUCT_OF(n, product, bf16, BF16) PRODUCT_OF(n, product, f32, F32) PRODUCT_OF(n, whole_product, int8, INT8) PRODUCT_OF(n, whole_product, int4, INT4)
#endif
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
#ifdef __AMX_INT8__
static const Product products[2][MAX_ROWS] = {{ALL(bf16)}, {ALL(f32)}};
#else
static const Product products[4][MAX_ROWS] = {{ALL(bf16)}, {ALL(f32)}, {ALL(int8)}, {ALL(int4)}};
#endif

/* How many rows one product takes. Tiles take what they can at once; fewer rows would cost them the same. */
INLINE int64_t most_rows(const Linear *l) {
#ifdef __AMX_BF16__
    if (l->kind >= INT8) return TILE_ROWS;
    if (l->kind == BF16 && l->inputs % 32 == 0) return 2 * TILE_ROWS;
#endif
    return MAX_ROWS;
}

/* Of `left` rows: 32 as 11, 11, 10 where a product of fewer costs less. */
INLINE int64_t rows_of_product(int64_t left, int64_t most) { return most == MAX_ROWS ? ceil_div(left, ceil_div(left, most)) : min64(left, most); }

static void multiply(int64_t rows, SIGNATURE, int kind) {
#ifdef __AMX_BF16__
    if (kind >= INT8) whole_tile_product(rows, l, block, w, x, stride, ahead, pace, out, kind);
    else if (most_rows(l) == MAX_ROWS) products[kind][rows - 1](l, block, w, x, stride, ahead, pace, out);
    else if (rows > TILE_ROWS) tile_product(1, rows, l->inputs, w, COLUMNS * 4, x, stride, ahead, pace, out, COLUMNS * 4);
    else tile_product(0, rows, l->inputs, w, COLUMNS * 4, x, stride, ahead, pace, out, COLUMNS * 4);
#else
    products[kind][rows - 1](l, block, w, x, stride, ahead, pace, out);
#endif
}

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
            put_vector(out, at / 2 + i, silu(gate) * value, dtype);
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
    int64_t most = most_rows(l);
    char *unpacked = l->kind == INT4 && rows > most ? aligned_alloc(LINE, padded(l->inputs) * COLUMNS) : 0;
    FOR_TEAM(member, item, blocks * chunks) {
        int64_t block = item / chunks, first = item % chunks * ROW_CHUNK, last = min64(first + ROW_CHUNK, rows), n;
        const char *w = (const char *)l->weight + block * size, *next = w + size, *ahead = w + AHEAD;
        int64_t pace = last - first > most ? 64 : 128; /* all of it in one pass, or half of the next block in each of two */
        int weight_kind = (int)l->kind;
        if (pace == 64) ahead = next;
        if (weight_kind == INT4) pace /= 2;
        if (weight_kind == INT4 && last - first > most) { /* unpacked once, and not by each pass */
            const char *groups = (const char *)l->groups + block * padded(l->inputs) * 2;
            for (int64_t i = 0; i < padded(l->inputs); i += SHIFT_INPUTS) w = as_bytes(w, &groups, unpacked + i * COLUMNS);
            w = unpacked;
            weight_kind = INT8;
        }
        for (int64_t row = first; row < last; row += n, ahead += size / 2) {
            n = rows_of_product(last - row, most);
            float y[MOST_ROWS * COLUMNS] __attribute__((aligned(LINE)));
            multiply(n, l, block, w, (const char *)x + row * x_stride, x_stride, ahead, pace, y, weight_kind);
            for (int64_t r = 0; r < n; r++)
                finish_row(y + r * COLUMNS, l->bias, block * COLUMNS, min64(COLUMNS, l->outputs - block * COLUMNS), kind, out, row + r, l->outputs, dtype);
        }
    }
    free(unpacked);
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
    char *room = l->kind < INT8 ? 0 : aligned_alloc(LINE, ceil_div(rows * row_bytes(l), LINE) * LINE);
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team);
        forget_shapes();
        linear_team(&member, l, rows_for(&member, l, x, rows, dtype, room), rows, dtype, STORE, out);
        release_tiles();
    }
    free(room);
}
