/* One segment of keys for all queries of an item: where its rows lie, the scores, their weights, and the weighted values. */

typedef struct { /* where the rows of one segment of an item lie: those of positions [low, high), which begins at start */
    const char *keys[SEGMENT], *values[SEGMENT];
    const int32_t *table;
    int64_t head, start, low, high;
} Place;

typedef struct { /* one thread's memory; a state is (maximum in powers of two, sum, ..., values[head_dim]) per query */
    float *scores, *part, *state, *tile, *zipped;
    uint32_t *query, *queries_of_heads, *columns; /* query: of the KV head at hand; columns: of 16 queries, for tiles */
    uint8_t *weights; /* of bytes: high ones, then low ones, per query */
    float *query_scale, *scales_of_heads, *value, key_scale[SEGMENT], value_scale[SEGMENT];
    Place places[2];
    int64_t queries, rows[64 + MAX_QUERIES], low[64 + MAX_QUERIES], high[64 + MAX_QUERIES];
} Work;

/* Finds the rows of segment `index` of an item. Places outside of [low, high) point to the nearest row inside, so that whole
   tiles can be read. False where no query of the item sees a key of it. */
static __attribute__((noinline)) int locate(const Attention *a, const Step *s, const Item *item, int64_t index, int64_t head, Place *place) {
    const int32_t *table = s->block_tables + item->sequence * s->max_blocks;
    int64_t row = a->head_dim * width(a->kept), block_size = s->block_size, start = index * SEGMENT;
    int64_t low = max64(start, a->window ? item->low_position - a->window + 1 : 0);
    int64_t high = min64(start + SEGMENT, item->high_position + 1);
    place->table = table;
    place->head = head;
    place->start = start;
    place->low = low;
    place->high = high;
    if (low >= high) return 0;
    for (int64_t p = low; p < high;) {
        int64_t offset = p % block_size, n = min64(block_size - offset, high - p), t = p - start;
        int64_t at = ((table[p / block_size] * a->num_kv_heads + head) * block_size + offset) * row;
        const char *key = (const char *)a->key + at, *value = (const char *)a->value + at;
        for (int64_t i = 0; i < n; i++) place->keys[t + i] = key + i * row;
        for (int64_t i = 0; i < n; i++) place->values[t + i] = value + i * row;
        if (a->kept == INT8) {
            FETCH(a->key_scale + at / row);
            FETCH(a->value_scale + at / row);
        }
        p += n;
    }
    for (int64_t t = 0; t < low - start; t++) place->keys[t] = place->values[t] = place->keys[low - start];
    for (int64_t t = high - start; t < SEGMENT; t++) place->keys[t] = place->values[t] = place->keys[high - start - 1];
    return 1;
}

/* The scales of a segment's keys and values; 0 where no query looks. */
static void load_scales(const Attention *a, const Step *s, Work *w, const Place *place) {
    memset(w->key_scale, 0, sizeof w->key_scale);
    memset(w->value_scale, 0, sizeof w->value_scale);
    for (int64_t p = place->low; p < place->high;) {
        int64_t offset = p % s->block_size, n = min64(s->block_size - offset, place->high - p), t = p - place->start;
        int64_t at = (place->table[p / s->block_size] * a->num_kv_heads + place->head) * s->block_size + offset;
        memcpy(w->key_scale + t, a->key_scale + at, n * sizeof(float));
        memcpy(w->value_scale + t, a->value_scale + at, n * sizeof(float));
        p += n;
    }
}

/* Words of a query: two bf16, an even number of them; a float; or 4 high or 4 low bytes. */
static int64_t words_of(const Attention *a) {
    if (a->kept == INT8) return a->head_dim / 2;
    return PAIRS && a->dtype == BF16 ? ceil_div(a->head_dim / 2, 2) * 2 : a->head_dim;
}

/* Which keys of a segment each query sees; its partial result is empty as yet. */
static void see_keys(const Attention *a, const Step *s, Work *w, int64_t start, float *part) {
    int64_t stride = a->head_dim + HEADER, group = a->num_heads / a->num_kv_heads;
    for (int64_t q = 0; q < w->queries; q++) {
        int64_t position = s->positions[w->rows[q / group]];
        w->low[q] = max64(start, a->window ? position - a->window + 1 : 0) - start;
        w->high[q] = min64(start + SEGMENT, position + 1) - start;
        part[q * stride] = -INFINITY;
        part[q * stride + 1] = 0;
    }
}

/* Scores of tiles [t0, t1) to weights; their maximum and sum begin the partial result. Nothing weighs for who sees nothing. */
INLINE void soften_row(const Attention *a, Work *w, int64_t q, int64_t t0, int64_t t1, float *part, const int pairs) {
    float *scores = w->scores + q * SEGMENT;
    if (w->low[q] >= w->high[q]) memset(scores, 0, SEGMENT * sizeof(float));
    else (pairs ? soften_pairs : soften_floats)(a, scores, (int)t0, (int)t1, (int)w->low[q], (int)w->high[q], part, part + 1);
}

/* The partial results of one segment for all queries of an item, into `part`; meanwhile `next`, a segment ahead, is fetched. `many`: more
   queries than one group; what is read is then prepared once for all groups. */
INLINE void segment_of(const Attention *a, const Step *s, Work *w, const Place *place, const Place *next, float *part,
                       const int dtype, const int pairs, const int many) {
    int64_t start = place->start, stride = a->head_dim + HEADER;
    see_keys(a, s, w, start, part);
    int64_t first = place->low - start, last = place->high - start, t0 = first / VL * VL, t1 = ceil_div(last, VL) * VL, d = 0;
    int64_t words = words_of(a), pace = VL * a->head_dim * width(dtype) / (words / 2);
    if (dtype == INT8) load_scales(a, s, w, place);
    for (int64_t t = t0, tiles; t < t1; t += tiles * VL) {
        tiles = min64(TILES, (t1 - t) / VL);
        for (int64_t c = 0; c < tiles; c++) load_tile(w->tile + c * VL, place->keys, t + c * VL, a->head_dim, dtype, pairs);
        for (int64_t i = 0; many && i < tiles * VL; i++)
            for (int64_t at = 0; at < a->head_dim * width(dtype); at += 64) FETCH(next->keys[t + i] + at);
        for (int64_t q = 0; q < w->queries && dtype == INT8; q += GROUP) {
#define BYTES_OF(n, c) score_bytes(n, c, w->scores + q * SEGMENT + t, w->tile, w->query + q * words, words / 2, w->query_scale + q, w->key_scale + t, many ? 0 : next->keys + t)
#define BYTES(n) if (TILES == 2 && tiles == 2) BYTES_OF(n, TILES); else BYTES_OF(n, 1)
            BY_GROUP(w->queries - q, BYTES)
        }
        for (int64_t q = 0; q < w->queries && dtype != INT8; q += GROUP) {
#define SCORES_OF(n, c) score_group(n, c, w->scores + q * SEGMENT + t, w->tile, w->query + q * words, words, pairs, many ? 0 : next->keys + t, pace)
#define SCORES(n) if (TILES == 2 && tiles == 2) SCORES_OF(n, TILES); else SCORES_OF(n, 1)
            BY_GROUP(w->queries - q, SCORES)
        }
    }
    for (int64_t q = 0; q < w->queries; q++) {
        soften_row(a, w, q, t0, t1, part + q * stride, pairs);
        if (dtype == INT8)
            w->value[q] = weigh(w->scores + q * SEGMENT, w->value_scale, t0, t1, w->weights + q * 2 * SEGMENT, w->weights + (q * 2 + 1) * SEGMENT);
    }
    if (dtype == INT8) {
        for (int64_t t = t0; t < t1; t += 4) zip_bytes(place->values, next->values, t, a->head_dim, w->zipped + t / 4 * a->head_dim);
        for (; d < a->head_dim; d += CHUNK * VL)
            for (int64_t q = 0; q < w->queries; q += GROUP) {
#define BYTE_VALUES_OF(n, c) \
    value_bytes(n, c, w->zipped + d, a->head_dim, t0, t1, w->weights + q * 2 * SEGMENT, w->value + q, part + q * stride + HEADER + d, stride)
#define BYTE_VALUES(n) if (d + CHUNK * VL <= a->head_dim) BYTE_VALUES_OF(n, CHUNK); else BYTE_VALUES_OF(n, 1)
                BY_GROUP(w->queries - q, BYTE_VALUES)
            }
        return;
    }
    if (pairs) first = first / 2 * 2;
#ifdef __AVX512BF16__
    for (int64_t t = first; t < last && many && pairs; t += 2)
        for (int64_t i = 0; i + 2 * VL <= a->head_dim; i += 2 * VL) {
            vf low, high;
            FETCH(next->values[t] + i * 2);
            FETCH(next->values[t + 1] + i * 2);
            zip_pair(place->values, t, i * 2, &low, &high);
            vstore(w->zipped + t / 2 * a->head_dim + i, low);
            vstore(w->zipped + t / 2 * a->head_dim + i + VL, high);
        }
#endif
    for (int chunk = CHUNK; chunk > 0; chunk--)
        for (; d + chunk * 2 * VL <= a->head_dim; d += chunk * 2 * VL)
            for (int64_t q = 0; q < w->queries; q += GROUP) {
#define VALUES_OF(n, c) \
    value_group(n, c, place->values, next->values, d, first, last, w->scores + q * SEGMENT, part + q * stride + HEADER + d, stride, dtype, pairs, \
                many && pairs ? w->zipped : 0, a->head_dim)
#define VALUES(n) if (chunk == CHUNK) VALUES_OF(n, CHUNK); else VALUES_OF(n, 1)
                BY_GROUP(w->queries - q, VALUES)
            }
    for (int64_t q = 0; q < w->queries; q++)
        for (int64_t i = d; i < a->head_dim; i++) {
            float sum = 0;
            for (int64_t t = first; t < last; t++)
                sum += get(w->scores + q * SEGMENT, t, pairs ? BF16 : F32) * get(place->values[t], i, dtype);
            part[q * stride + HEADER + i] = sum;
        }
}

#ifdef __AMX_BF16__
/* Where 16 rows of keys from t on lie one after the other: in place, or copied to `room`. Rows that nobody sees may hold anything. */
INLINE const char *sixteen_keys(const Attention *a, const Step *s, const Place *place, int64_t t, char *room) {
    int64_t row = a->head_dim * 2, at = min64(max64(t, place->low - place->start), place->high - place->start - 1);
    if (s->block_size % TILE_ROWS == 0) return place->keys[at] - (at - t) * row;
    for (int64_t i = 0; i < TILE_ROWS; i++) memcpy(room + i * row, place->keys[t + i], row);
    return room;
}

/* Scores of up to 16 queries, keys by queries first: a product's factors can change places, the sum is the same. */
INLINE void score_few(const Attention *a, const Step *s, Work *w, const Place *place, const Place *next, int64_t t0, int64_t t1) {
    float scores[64 * TILE_ROWS] __attribute__((aligned(LINE)));
    for (int64_t t = t0; t < t1; t += 64) {
        const char *keys[4];
        for (int64_t i = 0; i < 4; i++)
            keys[i] = t + i * TILE_ROWS < t1 ? sixteen_keys(a, s, place, t + i * TILE_ROWS, (char *)w->tile + i * TILE_ROWS * a->head_dim * 2) : keys[0];
        score_keys(keys, a->head_dim, w->columns, scores);
        for (int64_t i = t; i < min64(t + 64, t1); i += VL) {
            for (int64_t k = i; k < i + VL; k++) fetch_lines(next->keys[k], a->head_dim * 2);
            for (int64_t q = 0; q < w->queries; q += 4) four_queries(scores + (i - t) * TILE_ROWS + q, w->scores + q * SEGMENT + i, SEGMENT);
        }
    }
}

/* Scores of many: queries by keys, which are turned about once for all. */
INLINE void score_many(const Attention *a, Work *w, const Place *place, const Place *next, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t += 32) {
        for (int64_t i = t; i < t + 32; i++) fetch_lines(next->keys[i], a->head_dim * 2);
        for (int64_t c = 0; c < TILES; c++) load_tile(w->tile + c * VL, place->keys, t + c * VL, a->head_dim, BF16, 1);
        tile_products(w->queries, a->head_dim, w->tile, TILES * VL * 4, w->query, a->head_dim * 2, w->scores + t, SEGMENT * 4);
    }
}

/* segment_of in tiles: of queries by 32 keys, and of weights by 32 elements. Keys that nobody sees weigh nothing. */
static __attribute__((noinline)) void segment_in_tiles(const Attention *a, const Step *s, Work *w, const Place *place, const Place *next, float *part) {
    int64_t start = place->start, stride = a->head_dim + HEADER, words = a->head_dim / 2;
    int64_t t0 = (place->low - start) / 32 * 32, t1 = ceil_div(place->high - start, 32) * 32;
    see_keys(a, s, w, start, part);
    if (w->queries <= TILE_ROWS) score_few(a, s, w, place, next, t0, t1);
    else score_many(a, w, place, next, t0, t1);
    for (int64_t q = 0; q < w->queries; q++) soften_row(a, w, q, t0, t1, part + q * stride, 1);
    for (int64_t t = t0; t < t1; t += 2)
        for (int64_t i = 0; i < a->head_dim; i += 2 * VL) {
            vf low, high;
            FETCH(next->values[t] + i * 2);
            FETCH(next->values[t + 1] + i * 2);
            zip_pair(place->values, t, i * 2, &low, &high);
            vstore(w->zipped + t * words + i, low);
            vstore(w->zipped + t * words + i + VL, high);
        }
    for (int64_t d = 0; d < a->head_dim; d += 32)
        tile_products(w->queries, t1 - t0, w->zipped + t0 * words + d, a->head_dim * 4, (const u16 *)w->scores + t0, SEGMENT * 4, part + HEADER + d, stride * 4);
}
#endif

static __attribute__((noinline)) void segment(const Attention *a, const Step *s, Work *w, const Place *place, const Place *next, float *part) {
#ifdef __AMX_BF16__
    if (is_tiled(a)) {
        segment_in_tiles(a, s, w, place, next, part);
        return;
    }
#endif
    if (a->kept == INT8 && w->queries <= GROUP) segment_of(a, s, w, place, next, part, INT8, 0, 0);
    else if (a->kept == INT8) segment_of(a, s, w, place, next, part, INT8, 0, 1);
    else if (a->dtype == BF16 && w->queries <= GROUP) segment_of(a, s, w, place, next, part, BF16, PAIRS, 0);
    else if (a->dtype == BF16) segment_of(a, s, w, place, next, part, BF16, PAIRS, 1);
    else if (w->queries <= GROUP) segment_of(a, s, w, place, next, part, F32, 0, 0);
    else segment_of(a, s, w, place, next, part, F32, 0, 1);
}

