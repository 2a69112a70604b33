/* Products of tiles (AMX): 16 rows of 64 bytes times 16 columns, one instruction. What row and column give is a sum in one order,
   whatever else the tiles hold, as everywhere in these kernels. */
#ifdef __AMX_BF16__
enum { TILE_ROWS = 16, TILE_BYTES = 64 };

static __thread int64_t tile_shapes; /* as this thread has set them; 0: unknown */

/* Who takes part in a step begins without knowledge of what others did to its tiles, and leaves none behind. */
INLINE void forget_shapes(void) { tile_shapes = 0; }
INLINE void release_tiles(void) { _tile_release(); }

/* Tiles 0, 1 and 4 take `upper` rows, 2, 3 and 5 take `lower`; 6 and 7 are for weights, keys or values, and whole. */
INLINE void shape_tiles(int64_t upper, int64_t lower) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    lower = max64(lower, 1);
    if (tile_shapes == upper * 32 + lower) return;
    tile_shapes = upper * 32 + lower;
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = TILE_BYTES;
        shapes.rows[i] = (uint8_t)(i > 5 ? TILE_ROWS : i == 2 || i == 3 || i == 5 ? lower : upper);
    }
    _tile_loadconfig(&shapes);
}

/* Lines of memory on their way to the second-level cache while a tile is multiplied. */
INLINE void fetch_lines(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) FETCH(from + i);
}

/* Up to 32 rows of x times 32 columns of w, in bf16; `depth` in whole tiles of 32. w: rows of pairs, for each column; strides in
   bytes. Memory `ahead` is fetched by `pace` bytes a row of w. */
INLINE void tile_product(const int two, int64_t rows, int64_t depth, const void *weights, int64_t w_stride, const void *from, int64_t x_stride,
                         const char *ahead, int64_t pace, float *out, int64_t out_stride) {
    const char *w = weights, *x = from, *below = x + TILE_ROWS * x_stride;
    char *to = (char *)out, *to_below = to + TILE_ROWS * out_stride;
    shape_tiles(min64(rows, TILE_ROWS), rows - TILE_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, w += TILE_ROWS * w_stride, x += TILE_BYTES, below += TILE_BYTES, ahead += TILE_ROWS * pace) {
        _tile_loadd(6, w, w_stride);
        _tile_loadd(4, x, x_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE_BYTES, w_stride);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_loadd(5, below, x_stride);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
        fetch_lines(ahead, TILE_ROWS * pace);
    }
    _tile_stored(0, to, out_stride);
    _tile_stored(1, to + TILE_BYTES, out_stride);
    if (two) _tile_stored(2, to_below, out_stride);
    if (two) _tile_stored(3, to_below + TILE_BYTES, out_stride);
}

/* The same for any number of rows, without fetching. */
INLINE void tile_products(int64_t rows, int64_t depth, const void *w, int64_t w_stride, const void *x, int64_t x_stride, float *out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; r += 2 * TILE_ROWS) {
        const char *from = (const char *)x + r * x_stride;
        float *to = (float *)((char *)out + r * out_stride);
        if (rows - r > TILE_ROWS) tile_product(1, min64(rows - r, 2 * TILE_ROWS), depth, w, w_stride, from, x_stride, 0, 0, to, out_stride);
        else tile_product(0, rows - r, depth, w, w_stride, from, x_stride, 0, 0, to, out_stride);
    }
}

/* The scores of up to 16 queries for 64 keys, whose rows are read where they lie: keys by queries, 16 floats a key. columns: the
   queries' pairs side by side. */
INLINE void score_keys(const char *const keys[4], int64_t head_dim, const uint32_t *columns, float *out) {
    shape_tiles(TILE_ROWS, TILE_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < head_dim; i += 32) {
        _tile_loadd(6, columns + i / 2 * TILE_ROWS, TILE_BYTES);
        _tile_loadd(4, keys[0] + i * 2, head_dim * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys[1] + i * 2, head_dim * 2);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys[2] + i * 2, head_dim * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys[3] + i * 2, head_dim * 2);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, out, TILE_BYTES);
    _tile_stored(1, out + 16 * TILE_ROWS, TILE_BYTES);
    _tile_stored(2, out + 32 * TILE_ROWS, TILE_BYTES);
    _tile_stored(3, out + 48 * TILE_ROWS, TILE_BYTES);
}

/* 16 keys by 4 queries, of rows of 16, as 4 rows of 16 keys. */
INLINE void four_queries(const float *from, float *to, int64_t stride) {
    __m512 rows[4];
    UNROLL for (int j = 0; j < 4; j++) {
        rows[j] = _mm512_castps128_ps512(_mm_loadu_ps(from + j * 16));
        rows[j] = _mm512_mask_broadcast_f32x4(rows[j], 0x00f0, _mm_loadu_ps(from + (4 + j) * 16));
        rows[j] = _mm512_mask_broadcast_f32x4(rows[j], 0x0f00, _mm_loadu_ps(from + (8 + j) * 16));
        rows[j] = _mm512_mask_broadcast_f32x4(rows[j], 0xf000, _mm_loadu_ps(from + (12 + j) * 16));
    }
    __m512 a = _mm512_unpacklo_ps(rows[0], rows[1]), b = _mm512_unpackhi_ps(rows[0], rows[1]);
    __m512 c = _mm512_unpacklo_ps(rows[2], rows[3]), d = _mm512_unpackhi_ps(rows[2], rows[3]);
    _mm512_storeu_ps(to, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_storeu_ps(to + stride, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_storeu_ps(to + 2 * stride, _mm512_shuffle_ps(b, d, 0x44));
    _mm512_storeu_ps(to + 3 * stride, _mm512_shuffle_ps(b, d, 0xee));
}

/* 64 inputs of up to 16 rows, their high bytes and their low ones, onto the sums of a block. */
INLINE void add_tiles_of_bytes(const char *w, const char *x, int64_t x_stride, int64_t to_low) {
    _tile_loadd(6, w, COLUMNS * 4);
    _tile_loadd(4, x, x_stride);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, w + TILE_BYTES, COLUMNS * 4);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(5, x + to_low, x_stride);
    _tile_dpbuud(2, 5, 6);
    _tile_dpbuud(3, 5, 7);
}
#else
INLINE void forget_shapes(void) {}
INLINE void release_tiles(void) {}
#endif
