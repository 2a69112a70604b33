/* Paged attention that reads K and V in place, for decode and prefill rows alike.

   A work item (plan.h) is a few rows and one KV head: every key it reads serves all its queries. Keys are taken in
   segments of SEGMENT at absolute positions; each gives a partial result (maximum, sum, weighted values), and partial
   results are merged in order (Milakov & Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
   FlashAttention). A partial result depends on its query and its keys alone, so that the same bits come out whoever
   computes it: alone, batched, in chunks, beside others who share the keys, by one thread or by many. */

/* Merges one query's partial result into its state; empty ones leave no trace. */
static __attribute__((noinline)) void merge(float *state, const float *part, int64_t head_dim) {
    if (part[0] == -INFINITY) return;
    if (state[0] == -INFINITY) { memcpy(state, part, (head_dim + HEADER) * sizeof(float)); return; }
    if (state[0] >= part[0]) {
        float b = exp2f(part[0] - state[0]);
        state[1] += part[1] * b;
        for (int64_t i = HEADER; i < head_dim + HEADER; i++) state[i] += part[i] * b;
    } else {
        float b = exp2f(state[0] - part[0]);
        state[0] = part[0];
        state[1] = state[1] * b + part[1];
        for (int64_t i = HEADER; i < head_dim + HEADER; i++) state[i] = state[i] * b + part[i];
    }
}

/* Divides by the sum (sinks take part in it) and writes one query's result. */
static __attribute__((noinline)) void finish(const Attention *a, const float *state, int64_t row, int64_t head, char *out) {
    float sum = state[1];
    if (a->sinks) sum += exp2f(a->sinks[head] * 1.44269504f - state[0]);
    float inverse = 1.0f / sum;
    const float *values = state + HEADER;
    int64_t d = 0;
    out += (row * a->num_heads + head) * a->head_dim * width(a->dtype);
    for (; d + 2 * VL <= a->head_dim && a->kept != INT8; d += 2 * VL) {
#ifdef __AVX512BF16__
        if (a->dtype == BF16) { /* as zip_pair left them */
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)(vload(values + d + VL) * inverse), (__m512)(vload(values + d) * inverse));
            both = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), both);
            memcpy(out + d * 2, &both, sizeof both);
            continue;
        }
#endif
        for (int i = 0; i < VL; i++) {
            put(out, d + (a->dtype == BF16 ? 2 * i : i), values[d + i] * inverse, a->dtype);
            put(out, d + (a->dtype == BF16 ? 2 * i + 1 : VL + i), values[d + VL + i] * inverse, a->dtype);
        }
    }
    for (; d < a->head_dim; d++) put(out, d, values[d] * inverse, a->dtype);
}

/* Makes one of the item's KV heads, counted from its first, the one at hand. */
INLINE void take_head(const Attention *a, Work *w, int64_t n) {
    w->query = w->queries_of_heads + n * ceil_div(w->queries, GROUP) * GROUP * words_of(a);
    w->query_scale = w->scales_of_heads + n * w->queries;
}

/* The queries of the KV head at hand as the scores read them, the words of GROUP queries side by side: pairs of bf16, floats,
   or two times 4 bytes. */
static void load_queries(const Attention *a, Work *w, const Plan *plan, const Item *item, int64_t head, const char *query, int64_t query_stride) {
    int64_t group = a->num_heads / a->num_kv_heads, size = width(a->dtype), words = words_of(a);
    for (int64_t q = 0; q < w->queries; q++) {
        int64_t row = w->rows[q / group] = plan->rows[item->rows + q / group];
        const char *from = query + (row * query_stride + (head * group + q % group) * a->head_dim) * size;
        uint32_t *to = w->query + q / GROUP * GROUP * words + q % GROUP;
        if (is_tiled(a)) {
            memcpy(w->query + q * a->head_dim / 2, from, a->head_dim * size);
            for (int64_t i = 0; i < a->head_dim / 2 && w->queries <= 16; i++) memcpy(w->columns + i * 16 + q, from + i * 4, 4);
        }
        else if (a->kept == INT8) w->query_scale[q] = quantize_query(from, a->head_dim, a->dtype, (uint8_t *)to);
        else if (PAIRS && a->dtype == BF16) {
            to[(words - 1) * GROUP] = 0;
            for (int64_t i = 0; i < a->head_dim / 2; i++) memcpy(to + i * GROUP, from + i * 4, 4);
        } else
            for (int64_t i = 0; i < a->head_dim; i++) {
                float x = get(from, i, (int)a->dtype);
                memcpy(to + i * GROUP, &x, 4);
            }
    }
}

/* Where the partial result of a row and head for a segment lies; those of the row's first item are folded into one. */
static float *partial_of(const Attention *a, const Plan *plan, int64_t row, int64_t head, int64_t segment) {
    const Row *r = &plan->by_row[row];
    int64_t slot = segment < r->folded ? 0 : segment - r->folded + 1;
    return plan->partials + r->partials + (slot * a->num_heads + head) * (a->head_dim + HEADER);
}

/* The merges of one row and KV head: partial results in order of segments, whoever computed them. */
static void merge_row(const Attention *a, const Plan *plan, int64_t row, int64_t kv_head, char *out) {
    int64_t group = a->num_heads / a->num_kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float *state = partial_of(a, plan, row, head, 0);
        for (int64_t index = plan->by_row[row].folded; index < plan->by_row[row].end; index++)
            merge(state, partial_of(a, plan, row, head, index), a->head_dim);
        finish(a, state, row, head, out);
    }
}

/* What an item leaves behind of one KV head: results of rows that it served alone, else partial ones. */
static void leave_head(const Attention *a, const Work *w, const Plan *plan, int64_t kv_head, int64_t index, const float *states, char *out) {
    int64_t group = a->num_heads / a->num_kv_heads, stride = a->head_dim + HEADER;
    for (int64_t q = 0; q < w->queries; q++) {
        int64_t row = w->rows[q / group], head = kv_head * group + q % group;
        if (plan->by_row[row].partials < 0) finish(a, states + q * stride, row, head, out);
        else memcpy(partial_of(a, plan, row, head, index), states + q * stride, stride * sizeof(float));
    }
}

/* One thread's share of the items. It takes the next one before it computes this one, so that it can fetch its keys while
   the memory bus would be idle otherwise. */
static void attend_items(const Attention *a, const Step *s, Work *w, const Plan *plan, int64_t *counter, const char *query, int64_t query_stride, char *out) {
    int64_t stride = a->head_dim + HEADER, flip = 0;
    int64_t i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED), is_located = 0;
    while (i < plan->num_items) {
        const Item *item = &plan->items[i], *then;
        int64_t following = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED), heads = item->end_head - item->head;
        w->queries = item->num_rows * (a->num_heads / a->num_kv_heads);
        for (int64_t n = 0; n < heads; n++) {
            take_head(a, w, n);
            load_queries(a, w, plan, item, item->head + n, query, query_stride);
        }
        for (int64_t at = 0; at < (item->last - item->first) * heads; at++) { /* all heads of a segment, then the next one */
            Place *place = &w->places[flip], *next = &w->places[1 - flip];
            int64_t index = item->first + at / heads, n = at % heads;
            float *state = w->state + n * w->queries * stride, *part = index == 0 ? state : w->part;
            if (at == 0 && !is_located) locate(a, s, item, index, item->head, place);
            if (index + (n + 1) / heads < item->last) is_located = locate(a, s, item, index + (n + 1) / heads, item->head + (n + 1) % heads, next);
            else is_located = following < plan->num_items && (then = &plan->items[following], locate(a, s, then, then->first, then->head, next));
            take_head(a, w, n);
            if (place->low < place->high) segment(a, s, w, place, is_located ? next : place, part);
            else for (int64_t q = 0; q < w->queries; q++) part[q * stride] = -INFINITY;
            if (item->first > 0) leave_head(a, w, plan, item->head + n, index, part, out);
            else if (index > 0)
                for (int64_t q = 0; q < w->queries; q++) merge(state + q * stride, part + q * stride, a->head_dim);
            if (item->first == 0 && index + 1 == item->last) leave_head(a, w, plan, item->head + n, 0, state, out);
            flip = 1 - flip;
        }
        i = following;
    }
}

/* Called by every thread of a team. query: rows of query_stride elements; out: (num_tokens, num_heads, head_dim). */
static void attend_team(const Member *member, const Attention *a, const Step *s, const Plan *plan, int64_t layer, const void *query, int64_t query_stride, void *out) {
    int64_t most = max64(MAX_QUERIES, a->num_heads), stride = a->head_dim + HEADER;
    Work *w = malloc(sizeof(Work));
    int64_t floats = 16 * a->head_dim + most * (SEGMENT + SEGMENT / 2 + 2 * stride + 2) + most * GROUP * (a->head_dim + 1) + (a->head_dim + 2) * VL * TILES + SEGMENT / 2 * a->head_dim;
    float *memory = aligned_alloc(LINE, ceil_div(floats * sizeof(float), LINE) * LINE);
    w->scores = memory;
    w->part = w->scores + most * SEGMENT;
    w->state = w->part + most * stride;
    w->zipped = w->state + most * stride;
    w->tile = w->zipped + SEGMENT / 2 * a->head_dim;
    w->queries_of_heads = (uint32_t *)(w->tile + (a->head_dim + 2) * VL * TILES);
    w->scales_of_heads = (float *)w->queries_of_heads + most * GROUP * (a->head_dim + 1);
    w->value = w->scales_of_heads + most;
    w->weights = (uint8_t *)(w->value + most);
    w->columns = (uint32_t *)(w->weights + most * 2 * SEGMENT);
    attend_items(a, s, w, plan, plan->next + layer, query, query_stride, out);
    wait_for_team(member);
    if (plan->num_merges) {
        FOR_TEAM(member, i, plan->num_merges * a->num_kv_heads) merge_row(a, plan, plan->merges[i / a->num_kv_heads], i % a->num_kv_heads, out);
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
        forget_shapes();
        attend_team(&member, a, s, &plan, 0, query, query_stride, out);
        release_tiles();
    }
    free_plan(plan);
}

/* Where the row of token t and KV head h lies in the cache, in rows. */
INLINE int64_t slot_of(const Attention *a, const Step *s, int64_t t, int64_t h) {
    return (s->slots[t] / s->block_size * a->num_kv_heads + h) * s->block_size + s->slots[t] % s->block_size;
}

/* One token's row of keys or values into the cache. */
INLINE void keep_row(const Attention *a, void *cache, float *scale, int64_t at, const float *x) {
    if (a->kept == INT8) scale[at] = quantize_row(x, a->head_dim, (int8_t *)cache + at * a->head_dim);
    else narrow(x, a->head_dim, a->kept, cache, at * a->head_dim);
}

/* key, value: (num_tokens, num_kv_heads, head_dim) of the model's dtype, copied to their slots. */
static void write_kv(const Attention *a, const Step *s, const void *key, const void *value) {
#pragma omp parallel for if (s->num_tokens >= 64)
    for (int64_t t = 0; t < s->num_tokens; t++)
        for (int64_t h = 0; h < a->num_kv_heads; h++) {
            float k[1024], v[1024];
            int64_t from = (t * a->num_kv_heads + h) * a->head_dim;
            widen(key, from, a->head_dim, a->dtype, k);
            widen(value, from, a->head_dim, a->dtype, v);
            keep_row(a, a->key, a->key_scale, slot_of(a, s, t, h), k);
            keep_row(a, a->value, a->value_scale, slot_of(a, s, t, h), v);
        }
}
