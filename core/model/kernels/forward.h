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
    if (dtype == BF16) for (i = 0; i < n; i++) ((u16 *)out)[i] = down(x[i] * scale * weight[i]);
    else for (i = 0; i < n; i++) ((float *)out)[i] = x[i] * scale * weight[i];
}

static void norm_team(const Member *member, const Model *m, const float *weight, const float *residual, int64_t rows, const int64_t *picked, void *out) {
    FOR_TEAM(member, r, rows)
        norm_row(residual + (picked ? picked[r] : r) * m->hidden, weight, m->hidden, m->epsilon, (char *)out + r * m->hidden * width(m->dtype), m->dtype);
    wait_for_team(member);
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
                if (m->dtype == BF16) for (int64_t i = 0; i < a->head_dim; i++) put(from, i, y[i], BF16);
                else memcpy(from, y, head);
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

static void forward(const Model *m, const Step *s, const Scratch *b) {
    int64_t n = s->num_tokens, hidden = m->hidden;
    Plan plan = make_plan(&m->layers[0].attention, s, num_threads(), m->num_layers);
    Team team = {0};
#pragma omp parallel num_threads(num_threads())
    {
        Member member = join_team(&team), *me = &member;
        begin_marks(me, b->seconds);
        FOR_TEAM(me, t, n)
            for (int64_t i = 0; i < hidden; i++) b->residual[t * hidden + i] = get(m->embedding, s->token_ids[t] * hidden + i, m->dtype);
        wait_for_team(me);
        for (int64_t i = 0; i < m->num_layers; i++) {
            const Layer *layer = &m->layers[i];
            norm_team(me, m, layer->input_norm, b->residual, n, 0, b->hidden);
            mark(me, PART_NORM);
            linear_team(me, &layer->qkv, b->hidden, n, m->dtype, STORE, b->qkv);
            mark(me, PART_LINEAR);
            rope_team(me, m, layer, s, b->qkv);
            mark(me, PART_ROPE);
            attend_team(me, &layer->attention, s, &plan, i, b->qkv, layer->qkv.outputs, b->mixed);
            mark(me, PART_ATTENTION);
            linear_team(me, &layer->output, b->mixed, n, m->dtype, ADD, b->residual);
            mark(me, PART_LINEAR);
            norm_team(me, m, layer->post_norm, b->residual, n, 0, b->hidden);
            mark(me, PART_NORM);
            linear_team(me, &layer->gate_up, b->hidden, n, m->dtype, GATE, b->inner);
            linear_team(me, &layer->down, b->inner, n, m->dtype, ADD, b->residual);
            mark(me, PART_LINEAR);
        }
        norm_team(me, m, m->final_norm, b->residual, s->num_logit_rows, s->logit_rows, b->hidden);
        mark(me, PART_NORM);
        linear_team(me, &m->head, b->hidden, s->num_logit_rows, m->dtype, LOGITS, b->logits);
        mark(me, PART_HEAD);
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
