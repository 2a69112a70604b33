/* Attention over keys and values of 8 bits, exact where it is a sum: one scale per token and KV head. Queries become 16
   bits, one scale each, and the weights of a segment, their keys' scales taken in, 16 bits of the largest; both as two
   unsigned bytes, which are multiplied with the cache's bytes in whole numbers. So products lose nothing that the cache
   has not lost already, and no order of sums matters. */

/* One head's n floats as bytes; returns their scale. NaN is not told from 0. */
static float quantize_row(const float *x, int64_t n, int8_t *out) {
    vf top = {0};
    for (int64_t i = 0; i < n; i += VL) top = vmax((vf)((vi)vload(x + i) & 0x7fffffff), top);
    float most = lane_max(top), inverse = most > 0 ? 127.0f / most : 0;
    for (int64_t i = 0; i < n; i += VL) {
        typedef int8_t narrow __attribute__((vector_size(VL)));
        narrow b = __builtin_convertvector(to_nearest(vload(x + i) * inverse), narrow);
        memcpy(out + i, &b, sizeof b);
    }
    return most / 127.0f;
}

/* A query as words of 4 high bytes, 2 * GROUP apart, and 4 low ones GROUP behind each, of whole numbers from 0 to 65535 that
   stand for -32768 and up; returns its scale. */
static float quantize_query(const char *from, int64_t n, int64_t dtype, uint8_t *out) {
    float x[1024];
    widen(from, 0, n, dtype, x);
    vf top = {0};
    for (int64_t i = 0; i < n; i += VL) top = vmax((vf)((vi)vload(x + i) & 0x7fffffff), top);
    float most = lane_max(top), inverse = most > 0 ? 32767.0f / most : 0;
    for (int64_t i = 0; i < n; i += VL) {
        int32_t whole[VL];
        vi rounded = to_nearest(vload(x + i) * inverse) + 32768;
        memcpy(whole, &rounded, sizeof rounded);
        for (int64_t j = i; j < i + VL; j++) {
            uint8_t *word = out + j / 4 * 2 * GROUP * 4 + j % 4;
            word[0] = (uint8_t)(whole[j - i] >> 8);
            word[GROUP * 4] = (uint8_t)whole[j - i];
        }
    }
    return most / 32767.0f;
}

/* As score_group, for `num_words` words of 4 bytes of a key. */
INLINE void score_bytes(const int nq, const int nt, float *scores, const float *tile, const uint32_t *query, int64_t num_words,
                        const float *query_scale, const float *key_scale, const char *const *ahead) {
    vi high[GROUP][TILES] = {0}, low[GROUP][TILES] = {0}, sum[TILES] = {0};
    for (int64_t i = 0; i < num_words; i++) {
        UNROLL for (int c = 0; c < nt; c++) {
            vi k = (vi)uload(tile + (i * TILES + c) * VL);
            if (ahead) FETCH(ahead[c * VL] + i * VL * 4);
            sum[c] = dot_bytes(sum[c], words(0x80808080u), k);
            UNROLL for (int q = 0; q < nq; q++) {
                high[q][c] = dot_bytes(high[q][c], words(query[2 * i * GROUP + q]), k);
                low[q][c] = dot_bytes(low[q][c], words(query[(2 * i + 1) * GROUP + q]), k);
            }
        }
    }
    UNROLL for (int q = 0; q < nq; q++) UNROLL for (int c = 0; c < nt; c++) {
        vf whole = __builtin_convertvector(high[q][c] - sum[c], vf) * 256.0f + __builtin_convertvector(low[q][c], vf);
        vstore(scores + q * SEGMENT + c * VL, whole * (vload(key_scale + c * VL) * query_scale[q]));
    }
}

/* The softened scores of one query, in place of which come their keys' weights in bytes; returns what the bytes stand for. */
INLINE float weigh(float *scores, const float *value_scale, int64_t t0, int64_t t1, uint8_t *high, uint8_t *low) {
    vf top = {0};
    for (int64_t t = t0; t < t1; t += VL) {
        vf x = vload(scores + t) * vload(value_scale + t);
        vstore(scores + t, x);
        top = vmax(x, top);
    }
    float most = lane_max(top), inverse = most > 0 ? 65535.0f / most : 0;
    for (int64_t t = t0; t < t1; t += VL) {
        vi whole = to_nearest(vload(scores + t) * inverse);
        bytes h = __builtin_convertvector(whole >> 8, bytes), l = __builtin_convertvector(whole & 255, bytes);
        memcpy(high + t, &h, sizeof h);
        memcpy(low + t, &l, sizeof l);
    }
    return most / 65535.0f;
}

/* Rows t to t + 3 of V, zipped: a word of 4 keys for each of n elements. The rows `ahead` are fetched. */
INLINE void zip_bytes(const char *const *rows, const char *const *ahead, int64_t t, int64_t n, float *out) {
    typedef int8_t sixteen __attribute__((vector_size(16)));
    int64_t i = 0;
    for (int64_t k = t; k < t + 4; k++)
        for (int64_t at = 0; at < n; at += 64) FETCH(ahead[k] + at);
#ifdef __AVX512F__
    for (; i + 64 <= n; i += 64) {
#define ROW(k) (__m512i)uload(rows[t + k] + i)
#define LANES(a, b, c) _mm512_shuffle_i64x2(a, b, c)
        __m512i ab = _mm512_unpacklo_epi8(ROW(0), ROW(1)), ab2 = _mm512_unpackhi_epi8(ROW(0), ROW(1));
        __m512i cd = _mm512_unpacklo_epi8(ROW(2), ROW(3)), cd2 = _mm512_unpackhi_epi8(ROW(2), ROW(3));
        __m512i v0 = _mm512_unpacklo_epi16(ab, cd), v1 = _mm512_unpackhi_epi16(ab, cd);
        __m512i v2 = _mm512_unpacklo_epi16(ab2, cd2), v3 = _mm512_unpackhi_epi16(ab2, cd2);
        __m512i low = LANES(v0, v1, 0x44), low2 = LANES(v2, v3, 0x44), high = LANES(v0, v1, 0xee), high2 = LANES(v2, v3, 0xee);
        vstore(out + i, (vf)LANES(low, low2, 0x88));
        vstore(out + i + 16, (vf)LANES(low, low2, 0xdd));
        vstore(out + i + 32, (vf)LANES(high, high2, 0x88));
        vstore(out + i + 48, (vf)LANES(high, high2, 0xdd));
    }
#endif
    for (; i < n; i += 16) {
        sixteen a, b, c, d;
        memcpy(&a, rows[t] + i, 16);
        memcpy(&b, rows[t + 1] + i, 16);
        memcpy(&c, rows[t + 2] + i, 16);
        memcpy(&d, rows[t + 3] + i, 16);
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
        typedef int16_t eight __attribute__((vector_size(16)));
        eight ab = (eight)__builtin_shufflevector(a, b, ZIP_LOW), cd = (eight)__builtin_shufflevector(c, d, ZIP_LOW);
        eight ab2 = (eight)__builtin_shufflevector(a, b, ZIP_HIGH), cd2 = (eight)__builtin_shufflevector(c, d, ZIP_HIGH);
        eight zipped;
#define STORE_ZIPPED(k, x, y, ...) zipped = __builtin_shufflevector(x, y, __VA_ARGS__); memcpy(out + i + 4 * k, &zipped, 16);
        STORE_ZIPPED(0, ab, cd, 0, 8, 1, 9, 2, 10, 3, 11) /* one by one: gathered in memory, they would be waited for */
        STORE_ZIPPED(1, ab, cd, 4, 12, 5, 13, 6, 14, 7, 15)
        STORE_ZIPPED(2, ab2, cd2, 0, 8, 1, 9, 2, 10, 3, 11)
        STORE_ZIPPED(3, ab2, cd2, 4, 12, 5, 13, 6, 14, 7, 15)
    }
}

/* As value_group: `chunk` vectors of elements, from zipped rows. */
INLINE void value_bytes(const int nq, const int chunk, const float *zipped, int64_t head_dim, int64_t t0, int64_t t1,
                        const uint8_t *weights, const float *value, float *out, int64_t stride) {
    vi high[GROUP][CHUNK] = {0}, low[GROUP][CHUNK] = {0};
    for (int64_t t = t0; t < t1; t += 4) {
        vi v[CHUNK];
        UNROLL for (int c = 0; c < chunk; c++) v[c] = (vi)uload(zipped + t / 4 * head_dim + c * VL);
        UNROLL for (int q = 0; q < nq; q++) {
            uint32_t h, l;
            memcpy(&h, weights + q * 2 * SEGMENT + t, 4);
            memcpy(&l, weights + (q * 2 + 1) * SEGMENT + t, 4);
            UNROLL for (int c = 0; c < chunk; c++) {
                high[q][c] = dot_bytes(high[q][c], words(h), v[c]);
                low[q][c] = dot_bytes(low[q][c], words(l), v[c]);
            }
        }
    }
    UNROLL for (int q = 0; q < nq; q++) UNROLL for (int c = 0; c < chunk; c++)
        vstore(out + q * stride + c * VL, __builtin_convertvector(high[q][c] * 256 + low[q][c], vf) * value[q]);
}
