/* The whole forward of a Llama-family decoder as one parallel region: the interpreter lock is given back once a step, and
   between two layers there is a wait for the team, not a call. What a layer holds is decided in decoder.py. */

/* RMS norm of x (n floats) into out, in the model's dtype. */
static void norm_row(const float *x, const float *weight, int64_t n, float epsilon, void *out, int dtype) {
    vf squares = {0};
    int64_t i = 0;
    float rest = 0;
    for (; i + VL <= n; i += VL) squares += vload(x + i) * vload(x + i);
    for (; i < n; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((lane_sum(squares) + rest) / n + epsilon);
    for (i = 0; i + VL <= n; i += VL) put_vector(out, i, vload(x + i) * scale * vload(weight + i), dtype);
    for (; i < n; i++) put(out, i, x[i] * scale * weight[i], dtype);
}

/* Norms of the residual's rows (or the picked ones) as layer `next` reads them. */
static const void *norm_team(const Member *member, const Model *m, const float *weight, const Scratch *b, int64_t rows, const int64_t *picked, const Linear *next) {
    int is_quantized = next->kind >= INT8, dtype = is_quantized ? F32 : m->dtype;
    FOR_TEAM(member, r, rows) {
        char *out = (char *)b->hidden + r * m->hidden * width(dtype);
        norm_row(b->residual + (picked ? picked[r] : r) * m->hidden, weight, m->hidden, m->epsilon, out, dtype);
        if (is_quantized) quantize_x(out, m->hidden, F32, (char *)b->quantized + r * row_bytes(next));
    }
    wait_for_team(member);
    return is_quantized ? b->quantized : b->hidden;
}

/* One head's query or key: its norm, if there is one, and its rotation; into y. */
INLINE void rotate(const Model *m, const float *norm, int64_t position, int64_t head_dim, const void *from, float *y) {
    float x[1024];
    int64_t half = m->rotary_dim / 2;
    const float *c = m->cos + position * half, *s = m->sin + position * half;
    widen(from, 0, head_dim, m->dtype, x);
    if (norm) {
        float sum = 0;
        for (int64_t i = 0; i < head_dim; i++) sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(sum / head_dim + m->epsilon);
        for (int64_t i = 0; i < head_dim; i++) x[i] *= scale * norm[i];
    }
    for (int64_t i = 0; i < half; i++) y[i] = x[i] * c[i] - x[i + half] * s[i];
    for (int64_t i = 0; i < half; i++) y[i + half] = x[i + half] * c[i] + x[i] * s[i];
    for (int64_t i = 2 * half; i < head_dim; i++) y[i] = x[i];
}

/* Rotates queries in place and puts rotated keys, and values, into their slots. qkv: (num_tokens, (heads + 2 kv_heads) head_dim). */
static void rope_team(const Member *member, const Model *m, const Layer *layer, const Step *s, char *qkv) {
    const Attention *a = &layer->attention;
    int64_t head = a->head_dim * width(m->dtype), heads = a->num_heads + 2 * a->num_kv_heads;
    FOR_TEAM(member, t, s->num_tokens)
        for (int64_t h = 0; h < heads; h++) {
            char *from = qkv + (t * heads + h) * head;
            float y[1024];
            if (h < a->num_heads) {
                rotate(m, layer->query_norm, s->positions[t], a->head_dim, from, y);
                narrow(y, a->head_dim, m->dtype, from, 0);
            } else if (h < a->num_heads + a->num_kv_heads) {
                rotate(m, layer->key_norm, s->positions[t], a->head_dim, from, y);
                keep_row(a, a->key, a->key_scale, slot_of(a, s, t, h - a->num_heads), y);
            } else {
                widen(from, 0, a->head_dim, m->dtype, y);
                keep_row(a, a->value, a->value_scale, slot_of(a, s, t, h - a->num_heads - a->num_kv_heads), y);
            }
        }
    wait_for_team(member);
}

/* One row of the embedding, which is the head's where the two are tied: every word of a packed row lies COLUMNS words on. */
static void embed(const Model *m, int64_t id, float *out) {
    const Linear *head = &m->head;
    if (m->embedding) {
        for (int64_t i = 0; i < m->hidden; i++) out[i] = get(m->embedding, id * m->hidden + i, m->dtype);
        return;
    }
    const char *w = (const char *)head->weight + id / COLUMNS * block_bytes(head) + id % COLUMNS * 4;
    int64_t a_word = head->kind == F32 ? 1 : head->kind == BF16 ? 2 : 4;
    for (int64_t i = 0; i < m->hidden; i += a_word, w += COLUMNS * 4)
        for (int64_t j = 0; j < min64(a_word, m->hidden - i); j++)
            out[i + j] = head->kind == INT8 ? head->scale[id] * (((const uint8_t *)w)[j] - 128) : get(w, j, head->kind);
}

static void forward(const Model *m, const Step *s, const Scratch *b) {
    int64_t n = s->num_tokens;
    Plan plan = make_plan(&m->layers[0].attention, s, num_threads(), m->num_layers);
    Team team = {0};
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team), *me = &member;
        begin_marks(me, b->seconds);
        forget_shapes();
        FOR_TEAM(me, t, n) embed(m, s->token_ids[t], b->residual + t * m->hidden);
        wait_for_team(me);
        const void *x;
        for (int64_t i = 0; i < m->num_layers; i++) {
            const Layer *layer = &m->layers[i];
            x = norm_team(me, m, layer->input_norm, b, n, 0, &layer->qkv);
            mark(me, PART_NORM);
            linear_team(me, &layer->qkv, x, n, m->dtype, STORE, b->qkv);
            mark(me, PART_LINEAR);
            rope_team(me, m, layer, s, b->qkv);
            mark(me, PART_ROPE);
            attend_team(me, &layer->attention, s, &plan, i, b->qkv, layer->qkv.outputs, b->mixed);
            mark(me, PART_ATTENTION);
            x = rows_for(me, &layer->output, b->mixed, n, m->dtype, b->quantized);
            linear_team(me, &layer->output, x, n, m->dtype, ADD, b->residual);
            mark(me, PART_LINEAR);
            x = norm_team(me, m, layer->post_norm, b, n, 0, &layer->gate_up);
            mark(me, PART_NORM);
            linear_team(me, &layer->gate_up, x, n, m->dtype, GATE, b->inner);
            x = rows_for(me, &layer->down, b->inner, n, m->dtype, b->quantized);
            linear_team(me, &layer->down, x, n, m->dtype, ADD, b->residual);
            mark(me, PART_LINEAR);
        }
        x = norm_team(me, m, m->final_norm, b, s->num_logit_rows, s->logit_rows, &m->head);
        mark(me, PART_NORM);
        linear_team(me, &m->head, x, s->num_logit_rows, m->dtype, LOGITS, b->logits);
        mark(me, PART_HEAD);
        release_tiles();
    }
    free_plan(plan);
}

/* The first of the largest logits among the first `valid` of each row; -1 where one is NaN or infinite. */
static void greedy(const float *logits, int64_t rows, int64_t stride, int64_t valid, int64_t *out) {
#pragma omp parallel for schedule(static) if (rows >= 8)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        float best = -INFINITY, poison = 0;
        int64_t at = 0;
        for (int64_t start = 0; start < valid; start += 512) {
            int64_t n = min64(512, valid - start), i = 0;
            vf top = (vf){0} - INFINITY, zero = {0};
            for (; i + VL <= n; i += VL) {
                vf v = vload(x + start + i);
                top = vmax(v, top);
                zero += v * 0.0f;
            }
            float most = lane_max(top);
            poison += lane_sum(zero);
            for (; i < n; i++) {
                most = x[start + i] > most ? x[start + i] : most;
                poison += x[start + i] * 0.0f;
            }
            if (most > best) {
                best = most;
                for (i = 0; i < n; i++) if (x[start + i] == most) break;
                at = start + i;
            }
        }
        out[r] = poison == 0 ? at : -1;
    }
}
