/* Paged attention that reads K and V in place, for decode and prefill rows alike.

   A work item is a few rows of one sequence and one KV head: every key it reads serves all its queries. Keys are taken in
   segments of SEGMENT at absolute positions; each gives a partial result (maximum, sum, weighted values), and partial
   results are merged in order (Milakov & Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
   FlashAttention). A partial result depends on its query and its keys alone, so that the same bits come out whoever
   computes it: alone, batched, in chunks, by one thread or by many.

   Within a tile of VL keys the lanes are keys (K is transposed on the fly), so that no sum runs across lanes. */
enum { GROUP = 6, CHUNK = VL == 16 ? 2 : 1, MAX_QUERIES = 24, MIN_SPLIT = 2 };

typedef struct { int64_t sequence, head, row, rows, first, last, partial; } Item; /* segments [first, last) */
typedef struct { Item *items, *merges; float *partials; int64_t *next, num_items, num_merges, step; } Plan; /* next: per layer */

typedef struct { /* where the rows of one segment of an item lie: those of positions [low, high), which begins at start */
    const char *keys[SEGMENT], *values[SEGMENT];
    int64_t start, low, high;
} Place;

typedef struct { /* one thread's memory; a state is (maximum, sum, values[head_dim]) per query */
    float *scores, *part, *state, *tile;
    uint32_t *query;
    Place places[2];
    int64_t queries, low[64 + MAX_QUERIES], high[64 + MAX_QUERIES];
} Work;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Items of one step. Long contexts are split by segments where there are too few items for the threads. */
static Plan make_plan(const Attention *a, const Step *s, int64_t threads, int64_t layers) {
    int64_t group = a->num_heads / a->num_kv_heads, rows = max64(1, MAX_QUERIES / group), count = 0, work = 0;
    for (int64_t i = 0; i < s->num_sequences; i++) {
        int64_t n = ceil_div(s->row_starts[i + 1] - s->row_starts[i], rows) * a->num_kv_heads;
        count += n;
        work += n * ceil_div(s->context_lens[i], SEGMENT);
    }
    int64_t share = count < 8 * threads ? max64(MIN_SPLIT, ceil_div(work, 4 * threads)) : INT64_MAX, pieces = 0, partial = 0;
    for (int64_t i = 0; i < s->num_sequences; i++)
        pieces += ceil_div(s->row_starts[i + 1] - s->row_starts[i], rows) * a->num_kv_heads *
                  (share == INT64_MAX ? 1 : ceil_div(ceil_div(s->context_lens[i], SEGMENT), share));
    Plan plan = {malloc(sizeof(Item) * (pieces + 1)), malloc(sizeof(Item) * (count + 1)), 0, calloc(layers, sizeof(int64_t)), 0, 0, a->head_dim + 2};
    for (int64_t i = 0; i < s->num_sequences; i++)
        for (int64_t row = s->row_starts[i]; row < s->row_starts[i + 1]; row += rows)
            for (int64_t head = 0; head < a->num_kv_heads; head++) {
                int64_t n = min64(rows, s->row_starts[i + 1] - row);
                int64_t last = ceil_div(s->positions[row + n - 1] + 1, SEGMENT);
                Item item = {i, head, row, n, 0, last, -1};
                if (last > share) {
                    item.partial = partial;
                    partial += last * n * group * plan.step;
                    plan.merges[plan.num_merges++] = item;
                    for (int64_t first = 0; first < last; first += share) {
                        item.first = first;
                        item.last = min64(first + share, last);
                        plan.items[plan.num_items++] = item;
                    }
                } else
                    plan.items[plan.num_items++] = item;
            }
    if (partial) plan.partials = malloc(sizeof(float) * partial);
    return plan;
}

static void free_plan(Plan plan) {
    free(plan.items);
    free(plan.merges);
    free(plan.partials);
    free(plan.next);
}

/* The scores of nq queries for one tile of VL keys. Meanwhile memory from `ahead` on is fetched, `pace` bytes at a time. */
INLINE void score_group(const int nq, float *scores, const float *tile, const uint32_t *query, int64_t words, int pairs,
                        const char *ahead, int64_t pace) {
    vf even[GROUP] = {0}, odd[GROUP] = {0};
    for (int64_t i = 0; i < words; i += 2, ahead += pace) {
        FETCH(ahead);
        if (pace > 64) FETCH(ahead + 64);
        vf k0 = vload(tile + i * VL), k1 = vload(tile + (i + 1) * VL);
        UNROLL for (int q = 0; q < nq; q++) {
            const uint32_t *w = query + q * words + i;
#ifdef __AVX512BF16__
            if (pairs) {
                even[q] = (vf)_mm512_dpbf16_ps((__m512)even[q], (__m512bh)_mm512_set1_epi32(w[0]), (__m512bh)k0);
                odd[q] = (vf)_mm512_dpbf16_ps((__m512)odd[q], (__m512bh)_mm512_set1_epi32(w[1]), (__m512bh)k1);
                continue;
            }
#endif
            float a, b;
            memcpy(&a, w, 4);
            memcpy(&b, w + 1, 4);
            even[q] += a * k0;
            odd[q] += b * k1;
        }
    }
    UNROLL for (int q = 0; q < nq; q++) vstore(scores + q * SEGMENT, even[q] + odd[q]);
}

/* Weighted sums of CHUNK (or 1) pairs of vectors of V over keys [t0, t1), while the rows `ahead` are fetched. */
INLINE void value_group(const int nq, const int chunk, const char *const *rows, const char *const *ahead, int64_t at, int64_t t0,
                        int64_t t1, const float *weights, float *out, int64_t stride, const int dtype) {
    vf acc[GROUP][2 * CHUNK] = {0};
    for (int64_t t = t0; t < t1; t++) {
        for (int i = 0; i < chunk * 2 * VL * width(dtype); i += 64) FETCH(ahead[t] + at + i);
        vf v[2 * CHUNK];
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

/* K rows [t, t + VL) of the segment as a tile: lanes are keys; words are bf16 pairs, or floats. */
INLINE void load_tile(Work *w, const char *const *keys, int64_t t, int64_t head_dim, int dtype, int pairs) {
    int64_t words = dtype == BF16 ? head_dim / 2 : head_dim, i = 0;
    for (; i + VL <= words; i += VL) {
        vu a[VL];
        UNROLL for (int k = 0; k < VL; k++) a[k] = uload(keys[t + k] + i * 4);
        transpose(a);
        if (dtype == BF16 && !pairs)
            UNROLL for (int k = 0; k < VL; k++) {
                vstore(w->tile + (2 * (i + k)) * VL, (vf)(a[k] << 16));
                vstore(w->tile + (2 * (i + k) + 1) * VL, (vf)(a[k] & 0xffff0000u));
            }
        else
            UNROLL for (int k = 0; k < VL; k++) vstore(w->tile + (i + k) * VL, (vf)a[k]);
    }
    for (; i < words; i++)
        for (int k = 0; k < VL; k++) {
            uint32_t u;
            memcpy(&u, keys[t + k] + i * 4, 4);
            if (dtype == BF16 && !pairs) {
                w->tile[2 * i * VL + k] = up((u16)u);
                w->tile[(2 * i + 1) * VL + k] = up((u16)(u >> 16));
            } else
                memcpy(w->tile + i * VL + k, &u, 4);
        }
    if (words % 2 && pairs) memset(w->tile + words * VL, 0, VL * 4);
}

/* exp(score - maximum) of one query over its own keys [low, high) of the tiles [t0, t1), zero elsewhere. */
INLINE void soften(const Attention *a, float *scores, int64_t t0, int64_t t1, int64_t low, int64_t high, float *maximum, float *sum) {
    vf top = (vf){0} - INFINITY, total = {0};
    for (int64_t t = t0; t < t1; t += VL) {
        vf s = vload(scores + t) * a->scale;
        if (a->softcap > 0) s = a->softcap * (1.0f - 2.0f / (vexp(s * (2.0f / a->softcap)) + 1.0f));
        if (t < low || t + VL > high) {
            vi place = iota() + (int32_t)t;
            s = select_if((place >= (int32_t)low) & (place < (int32_t)high), s, (vf){0} - INFINITY);
        }
        top = vmax(s, top);
        vstore(scores + t, s);
    }
    *maximum = lane_max(top);
    for (int64_t t = t0; t < t1; t += VL) {
        vf e = vexp(vload(scores + t) - *maximum);
        total += e;
        vstore(scores + t, e);
    }
    *sum = lane_sum(total);
}

/* Finds the rows of segment `index` of an item. Places outside of [low, high) point to the nearest row inside, so that whole
   tiles can be read. False where no query of the item sees a key of it. */
static __attribute__((noinline)) int locate(const Attention *a, const Step *s, const Item *item, int64_t index, Place *place) {
    const int32_t *table = s->block_tables + item->sequence * s->max_blocks;
    int64_t row = a->head_dim * width(a->dtype), block_size = s->block_size, start = index * SEGMENT;
    int64_t low = max64(start, a->window ? s->positions[item->row] - a->window + 1 : 0);
    int64_t high = min64(start + SEGMENT, s->positions[item->row + item->rows - 1] + 1);
    place->start = start;
    place->low = low;
    place->high = high;
    if (low >= high) return 0;
    for (int64_t p = low; p < high;) {
        int64_t offset = p % block_size, n = min64(block_size - offset, high - p), t = p - start;
        int64_t at = ((table[p / block_size] * a->num_kv_heads + item->head) * block_size + offset) * row;
        const char *key = (const char *)a->key + at, *value = (const char *)a->value + at;
        for (int64_t i = 0; i < n; i++) place->keys[t + i] = key + i * row;
        for (int64_t i = 0; i < n; i++) place->values[t + i] = value + i * row;
        p += n;
    }
    for (int64_t t = 0; t < low - start; t++) place->keys[t] = place->values[t] = place->keys[low - start];
    for (int64_t t = high - start; t < SEGMENT; t++) place->keys[t] = place->values[t] = place->keys[high - start - 1];
    return 1;
}

/* The partial results of one segment for all queries of an item, into `part`; `next` is fetched meanwhile. */
INLINE void segment_of(const Attention *a, const Step *s, Work *w, const Item *item, const Place *place, const Place *next,
                       float *part, const int dtype, const int pairs) {
    int64_t start = place->start, group = a->num_heads / a->num_kv_heads, stride = a->head_dim + 2;
    for (int64_t q = 0; q < w->queries; q++) {
        int64_t position = s->positions[item->row + q / group];
        w->low[q] = max64(start, a->window ? position - a->window + 1 : 0) - start;
        w->high[q] = min64(start + SEGMENT, position + 1) - start;
        part[q * stride] = -INFINITY;
        part[q * stride + 1] = 0;
    }
    int64_t first = place->low - start, last = place->high - start, t0 = first / VL * VL, t1 = ceil_div(last, VL) * VL, d = 0;
    int64_t words = pairs ? ceil_div(a->head_dim / 2, 2) * 2 : a->head_dim, pace = VL * a->head_dim * width(dtype) / (words / 2);
    for (int64_t t = t0; t < t1; t += VL) {
        load_tile(w, place->keys, t, a->head_dim, dtype, pairs);
        for (int64_t q = 0; q < w->queries; q += GROUP) {
#define SCORES(n) score_group(n, w->scores + q * SEGMENT + t, w->tile, w->query + q * words, words, pairs, place->values[t], pace)
            BY_GROUP(w->queries - q, SCORES)
        }
    }
    for (int64_t q = 0; q < w->queries; q++) {
        if (w->low[q] < w->high[q])
            soften(a, w->scores + q * SEGMENT, t0, t1, w->low[q], w->high[q], part + q * stride, part + q * stride + 1);
        else
            memset(w->scores + q * SEGMENT, 0, SEGMENT * sizeof(float));
    }
    for (int chunk = CHUNK; chunk > 0; chunk--)
        for (; d + chunk * 2 * VL <= a->head_dim; d += chunk * 2 * VL)
            for (int64_t q = 0; q < w->queries; q += GROUP) {
#define VALUES_OF(n, c) \
    value_group(n, c, place->values, next->keys, d * width(dtype), first, last, w->scores + q * SEGMENT, part + q * stride + 2 + d, stride, dtype)
#define VALUES(n) if (chunk == CHUNK) VALUES_OF(n, CHUNK); else VALUES_OF(n, 1)
                BY_GROUP(w->queries - q, VALUES)
            }
    for (int64_t q = 0; q < w->queries; q++)
        for (int64_t i = d; i < a->head_dim; i++) {
            float sum = 0;
            for (int64_t t = first; t < last; t++) sum += w->scores[q * SEGMENT + t] * get(place->values[t], i, dtype);
            part[q * stride + 2 + i] = sum;
        }
}

static __attribute__((noinline)) void segment(const Attention *a, const Step *s, Work *w, const Item *item, const Place *place,
                                              const Place *next, float *part) {
#ifdef __AVX512BF16__
    if (a->dtype == BF16) { segment_of(a, s, w, item, place, next, part, BF16, 1); return; }
#else
    if (a->dtype == BF16) { segment_of(a, s, w, item, place, next, part, BF16, 0); return; }
#endif
    segment_of(a, s, w, item, place, next, part, F32, 0);
}

/* Merges one query's partial result into its state; empty ones leave no trace. */
static __attribute__((noinline)) void merge(float *state, const float *part, int64_t head_dim) {
    if (part[0] == -INFINITY) return;
    if (state[0] == -INFINITY) { memcpy(state, part, (head_dim + 2) * sizeof(float)); return; }
    float top = state[0] > part[0] ? state[0] : part[0], a = expf(state[0] - top), b = expf(part[0] - top);
    state[0] = top;
    for (int64_t i = 1; i < head_dim + 2; i++) state[i] = state[i] * a + part[i] * b;
}

/* Divides by the sum (sinks take part in it) and writes one query's result. */
static __attribute__((noinline)) void finish(const Attention *a, const float *state, int64_t head, void *out) {
    float sum = state[1];
    if (a->sinks) sum += expf(a->sinks[head] - state[0]);
    float inverse = 1.0f / sum;
    int64_t d = 0;
    for (; d + 2 * VL <= a->head_dim; d += 2 * VL)
        for (int i = 0; i < VL; i++) {
            put(out, d + (a->dtype == BF16 ? 2 * i : i), state[2 + d + i] * inverse, a->dtype);
            put(out, d + (a->dtype == BF16 ? 2 * i + 1 : VL + i), state[2 + d + VL + i] * inverse, a->dtype);
        }
    for (; d < a->head_dim; d++) put(out, d, state[2 + d] * inverse, a->dtype);
}

/* The queries of an item as the scores read them: pairs of bf16, or floats. */
static void load_queries(const Attention *a, Work *w, const Item *item, const char *query, int64_t query_stride) {
    int64_t group = a->num_heads / a->num_kv_heads, size = width(a->dtype), words = a->head_dim;
    int pairs = 0;
#ifdef __AVX512BF16__
    pairs = a->dtype == BF16;
    if (pairs) words = ceil_div(a->head_dim / 2, 2) * 2;
#endif
    w->queries = item->rows * group;
    for (int64_t q = 0; q < w->queries; q++) {
        const char *from = query + ((item->row + q / group) * query_stride + (item->head * group + q % group) * a->head_dim) * size;
        uint32_t *to = w->query + q * words;
        to[words - 1] = 0;
        if (pairs || a->dtype == F32) memcpy(to, from, a->head_dim * size);
        else for (int64_t i = 0; i < a->head_dim; i++) to[i] = (uint32_t)((const u16 *)from)[i] << 16;
        w->state[q * (a->head_dim + 2)] = -INFINITY;
    }
}

/* The merges of one split item: every segment's partial result in order, whoever computed it. */
static void merge_item(const Attention *a, const Item *item, const Plan *plan, char *out) {
    int64_t group = a->num_heads / a->num_kv_heads, stride = a->head_dim + 2, queries = item->rows * group;
    for (int64_t q = 0; q < queries; q++) {
        float *state = plan->partials + item->partial + q * stride;
        for (int64_t index = 1; index < item->last; index++) merge(state, state + index * queries * stride, a->head_dim);
        int64_t head = item->head * group + q % group;
        finish(a, state, head, out + ((item->row + q / group) * a->num_heads + head) * a->head_dim * width(a->dtype));
    }
}

/* One thread's share of the items. It takes the next one before it computes this one, so that it can fetch its keys while
   the memory bus would be idle otherwise. */
static void attend_items(const Attention *a, const Step *s, Work *w, const Plan *plan, int64_t *counter, const char *query, int64_t query_stride, char *out) {
    int64_t group = a->num_heads / a->num_kv_heads, stride = a->head_dim + 2, flip = 0;
    int64_t i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED), is_located = 0;
    while (i < plan->num_items) {
        const Item *item = &plan->items[i];
        int64_t following = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
        load_queries(a, w, item, query, query_stride);
        for (int64_t index = item->first; index < item->last; index++) {
            Place *place = &w->places[flip], *next = &w->places[1 - flip];
            float *part = item->partial < 0 ? w->part : plan->partials + item->partial + index * w->queries * stride;
            if (index == item->first && !is_located) locate(a, s, item, index, place);
            if (index + 1 < item->last) is_located = locate(a, s, item, index + 1, next);
            else is_located = following < plan->num_items && locate(a, s, &plan->items[following], plan->items[following].first, next);
            if (place->low < place->high) segment(a, s, w, item, place, is_located ? next : place, part);
            else for (int64_t q = 0; q < w->queries; q++) part[q * stride] = -INFINITY;
            if (item->partial < 0)
                for (int64_t q = 0; q < w->queries; q++) merge(w->state + q * stride, part + q * stride, a->head_dim);
            flip = 1 - flip;
        }
        for (int64_t q = 0; q < w->queries && item->partial < 0; q++) {
            int64_t head = item->head * group + q % group;
            finish(a, w->state + q * stride, head, out + ((item->row + q / group) * a->num_heads + head) * a->head_dim * width(a->dtype));
        }
        i = following;
    }
}

/* Called by every thread of a team. query: rows of query_stride elements; out: (num_tokens, num_heads, head_dim). */
static void attend_team(const Member *member, const Attention *a, const Step *s, const Plan *plan, int64_t layer, const void *query, int64_t query_stride, void *out) {
    int64_t most = max64(MAX_QUERIES, a->num_heads / a->num_kv_heads), stride = a->head_dim + 2;
    Work *w = malloc(sizeof(Work));
    float *memory = malloc((most * (SEGMENT + 2 * stride + a->head_dim + 1) + (a->head_dim + 2) * VL) * sizeof(float));
    w->scores = memory;
    w->part = w->scores + most * SEGMENT;
    w->state = w->part + most * stride;
    w->tile = w->state + most * stride;
    w->query = (uint32_t *)(w->tile + (a->head_dim + 2) * VL);
    attend_items(a, s, w, plan, plan->next + layer, query, query_stride, out);
    wait_for_team(member);
    if (plan->num_merges) {
        FOR_TEAM(member, i, plan->num_merges) merge_item(a, &plan->merges[i], plan, out);
        wait_for_team(member);
    }
    free(memory);
    free(w);
}

static void attend(const Attention *a, const Step *s, const void *query, int64_t query_stride, void *out) {
    Plan plan = make_plan(a, s, num_threads(), 1);
    Team team = {0};
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team);
        attend_team(&member, a, s, &plan, 0, query, query_stride, out);
    }
    free_plan(plan);
}

/* key, value: (num_tokens, num_kv_heads, head_dim), copied to their slots. */
static void write_kv(const Attention *a, const Step *s, const void *key, const void *value) {
    int64_t row = a->head_dim * width(a->dtype);
#pragma omp parallel for if (s->num_tokens >= 64)
    for (int64_t t = 0; t < s->num_tokens; t++)
        for (int64_t h = 0; h < a->num_kv_heads; h++) {
            int64_t block = s->slots[t] / s->block_size, offset = s->slots[t] % s->block_size;
            int64_t to = ((block * a->num_kv_heads + h) * s->block_size + offset) * row, from = (t * a->num_kv_heads + h) * row;
            memcpy((char *)a->key + to, (const char *)key + from, row);
            memcpy((char *)a->value + to, (const char *)value + from, row);
        }
}
