/* The arithmetic of attention over tiles of keys. Within a tile of VL keys the lanes are keys (K is transposed on the fly), so
   that no sum runs across lanes. With bf16 instructions (`pairs`) both products take two elements at a time: of K along the
   head, of V two neighbouring keys, whose rows are zipped; the weights are then bf16. */
enum { GROUP = 6, CHUNK = VL == 16 ? 2 : 1, TILES = VL == 16 ? 2 : 1 }; /* queries, vectors and tiles that one loop holds in registers */
#ifdef __AVX512BF16__
enum { PAIRS = 1 };
#else
enum { PAIRS = 0 };
#endif

/* The scores of nq queries for nt tiles of VL keys: words of TILES tiles side by side, and of GROUP queries. Meanwhile memory
   from `ahead` on is fetched, `pace` bytes at a time. */
INLINE void score_group(const int nq, const int nt, float *scores, const float *tile, const uint32_t *query, int64_t words,
                        const int pairs, const char *const *ahead, int64_t pace) {
    vf even[GROUP][TILES] = {0}, odd[GROUP][TILES] = {0};
    for (int64_t i = 0; i < words; i += 2) {
        vf k0[TILES], k1[TILES];
        UNROLL for (int c = 0; c < nt; c++) {
            k0[c] = vload(tile + (i * TILES + c) * VL);
            k1[c] = vload(tile + ((i + 1) * TILES + c) * VL);
            if (!ahead) continue;
            FETCH(ahead[c * VL] + i / 2 * pace);
            if (pace > 64) FETCH(ahead[c * VL] + i / 2 * pace + 64);
        }
        UNROLL for (int q = 0; q < nq; q++) {
            const uint32_t *w = query + i * GROUP + q;
#ifdef __AVX512BF16__
            if (pairs) {
                __m512bh a = (__m512bh)_mm512_set1_epi32(w[0]), b = (__m512bh)_mm512_set1_epi32(w[GROUP]);
                UNROLL for (int c = 0; c < nt; c++) {
                    even[q][c] = (vf)_mm512_dpbf16_ps((__m512)even[q][c], a, (__m512bh)k0[c]);
                    odd[q][c] = (vf)_mm512_dpbf16_ps((__m512)odd[q][c], b, (__m512bh)k1[c]);
                }
                continue;
            }
#endif
            float a, b;
            memcpy(&a, w, 4);
            memcpy(&b, w + GROUP, 4);
            UNROLL for (int c = 0; c < nt; c++) {
                even[q][c] += a * k0[c];
                odd[q][c] += b * k1[c];
            }
        }
    }
    UNROLL for (int q = 0; q < nq; q++) UNROLL for (int c = 0; c < nt; c++) vstore(scores + q * SEGMENT + c * VL, even[q][c] + odd[q][c]);
}

/* Rows t and t + 1 of V as pairs: the two vectors hold dims (8 i + 0..3) and (8 i + 4..7) of the 2 * VL from `at` on. */
#ifdef __AVX512BF16__
INLINE void zip_pair(const char *const *rows, int64_t t, int64_t at, vf *low, vf *high) {
    __m512i a = (__m512i)uload(rows[t] + at), b = (__m512i)uload(rows[t + 1] + at);
    *low = (vf)_mm512_unpacklo_epi16(a, b);
    *high = (vf)_mm512_unpackhi_epi16(a, b);
}
#endif

/* Weighted sums of `chunk` pairs of vectors of V, from element d on, over keys [t0, t1), while the rows `ahead` are fetched.
   With `pairs` t0 is even, the weights are bf16, and `zipped`, if given, holds the segment's pairs. */
INLINE void value_group(const int nq, const int chunk, const char *const *rows, const char *const *ahead, int64_t d, int64_t t0,
                        int64_t t1, const float *weights, float *out, int64_t stride, const int dtype, const int pairs,
                        const float *zipped, int64_t head_dim) {
    vf acc[GROUP][2 * CHUNK] = {0}, v[2 * CHUNK];
    int64_t at = d * width(dtype);
#ifdef __AVX512BF16__
    for (int64_t t = t0; t < t1 && pairs; t += 2) {
        UNROLL for (int c = 0; c < chunk; c++) {
            if (zipped) {
                v[2 * c] = vload(zipped + t / 2 * head_dim + d + c * 2 * VL);
                v[2 * c + 1] = vload(zipped + t / 2 * head_dim + d + c * 2 * VL + VL);
            } else {
                FETCH(ahead[t] + at + c * 64);
                FETCH(ahead[t + 1] + at + c * 64);
                zip_pair(rows, t, at + c * 64, &v[2 * c], &v[2 * c + 1]);
            }
        }
        UNROLL for (int q = 0; q < nq; q++) {
            uint32_t pair;
            memcpy(&pair, (const u16 *)(weights + q * SEGMENT) + t, 4);
            __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int c = 0; c < 2 * chunk; c++) acc[q][c] = (vf)_mm512_dpbf16_ps((__m512)acc[q][c], w, (__m512bh)v[c]);
        }
    }
#endif
    for (int64_t t = t0; t < t1 && !pairs; t++) {
        for (int i = 0; i < chunk * 2 * VL * width(dtype); i += 64) FETCH(ahead[t] + at + i);
        UNROLL for (int c = 0; c < chunk; c++) load_pair(rows[t] + at + c * 2 * VL * width(dtype), dtype, &v[2 * c], &v[2 * c + 1]);
        UNROLL for (int q = 0; q < nq; q++) {
            float w = weights[q * SEGMENT + t];
            UNROLL for (int c = 0; c < 2 * chunk; c++) acc[q][c] += w * v[c];
        }
    }
    UNROLL for (int q = 0; q < nq; q++) UNROLL for (int c = 0; c < 2 * chunk; c++) vstore(out + q * stride + c * VL, acc[q][c]);
}

#define BY_GROUP(n, CALL) \
    switch (n) { case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; \
                 case 4: CALL(4); break; case 5: CALL(5); break; default: CALL(6); }

/* K rows [t, t + VL) of the segment as a tile: lanes are keys; words are bf16 pairs, floats or 4 bytes, TILES * VL apart. */
INLINE void load_tile(float *tile, const char *const *keys, int64_t t, int64_t head_dim, const int dtype, const int pairs) {
    enum { NEXT = TILES * VL };
    int64_t words = head_dim * width(dtype) / 4, i = 0;
    const int is_widened = dtype == BF16 && !pairs;
    for (; i + VL <= words; i += VL) {
        vu a[VL];
        UNROLL for (int k = 0; k < VL; k++) a[k] = uload(keys[t + k] + i * 4);
        transpose(a);
        UNROLL for (int k = 0; k < VL; k++) {
            if (is_widened) {
                vstore(tile + 2 * (i + k) * NEXT, (vf)(a[k] << 16));
                vstore(tile + (2 * (i + k) + 1) * NEXT, (vf)(a[k] & 0xffff0000u));
            } else
                vstore(tile + (i + k) * NEXT, (vf)a[k]);
        }
    }
    for (; i < words; i++)
        for (int k = 0; k < VL; k++) {
            uint32_t u;
            memcpy(&u, keys[t + k] + i * 4, 4);
            if (is_widened) {
                tile[2 * i * NEXT + k] = up((u16)u);
                tile[(2 * i + 1) * NEXT + k] = up((u16)(u >> 16));
            } else
                memcpy(tile + i * NEXT + k, &u, 4);
        }
    if (words % 2 && pairs) memset(tile + words * NEXT, 0, VL * 4);
}

/* 2^(score - most) of tile t, zero outside of [low, high) where it is an `edge`; as bf16 with `pairs`, behind what is read. */
INLINE vf soften_tile(float *scores, int t, float scale, float most, const int edge, int low, int high, const int pairs) {
    vf e = vexp2(vload(scores + t) * scale - most, pairs);
    if (edge) e = select_if((iota() + t >= low) & (iota() + t < high), e, (vf){0});
#ifdef __AVX512BF16__
    if (pairs) {
        __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)e);
        memcpy((u16 *)scores + t, &narrow, sizeof narrow);
        return e;
    }
#endif
    vstore(scores + t, e);
    return e;
}

/* The softened scores of one query over its own keys [low, high) of the tiles [t0, t1), and their maximum and sum. */
INLINE void soften(const Attention *a, float *scores, int t0, int t1, int low, int high, float *maximum, float *sum, const int pairs) {
    const float log2e = 1.44269504f, scale = a->softcap > 0 ? log2e : a->scale * log2e;
    vf top = (vf){0} - INFINITY, total = {0};
    if (low == 0 && high == SEGMENT && a->softcap == 0) {
        UNROLL for (int t = 0; t < SEGMENT; t += VL) top = vmax(vload(scores + t), top);
        *maximum = lane_max(top) * scale;
        UNROLL for (int t = 0; t < SEGMENT; t += VL) total += soften_tile(scores, t, scale, *maximum, 0, 0, 0, pairs);
    } else {
        for (int t = t0; t < t1; t += VL) {
            vf s = vload(scores + t);
            if (a->softcap > 0) vstore(scores + t, s = a->softcap * (1.0f - 2.0f / (vexp(s * (a->scale * 2.0f / a->softcap)) + 1.0f)));
            top = vmax(select_if((iota() + t >= low) & (iota() + t < high), s, (vf){0} - INFINITY), top);
        }
        *maximum = lane_max(top) * scale;
        for (int t = t0; t < t1; t += VL) total += soften_tile(scores, t, scale, *maximum, 1, low, high, pairs);
    }
    *sum = lane_sum(total);
}
static __attribute__((noinline)) void soften_floats(const Attention *a, float *scores, int t0, int t1, int low, int high, float *maximum, float *sum) {
    soften(a, scores, t0, t1, low, high, maximum, sum, 0);
}
static __attribute__((noinline)) void soften_pairs(const Attention *a, float *scores, int t0, int t1, int low, int high, float *maximum, float *sum) {
    soften(a, scores, t0, t1, low, high, maximum, sum, PAIRS);
}
