/* Who computes which part of a step's attention: work items of a few rows and one KV head, or all of them.

   Sequences whose block tables begin alike share what they read: sorted by their tables, those that share a prefix are
   neighbours, and each stretch of whole segments that several of them hold in common becomes one item for all their rows
   (after Zheng et al., SGLang, 2024, and Juravsky et al., Hydragen, 2024). Long contexts are split by segments where there
   are too few items for the threads. Either way a row's partial results are kept, and merged in order of segments. */
#ifdef __AMX_BF16__
enum { MAX_QUERIES = 96 };
#else
enum { MAX_QUERIES = 48 };
#endif
enum { MIN_SPLIT = 2, HEADER = 16 }; /* HEADER: floats before the values of a partial result */

/* Whether both products are made of tiles. */
static int is_tiled(const Attention *a) {
#ifdef __AMX_BF16__
    return a->kept == BF16 && a->dtype == BF16 && a->head_dim % 32 == 0;
#else
    (void)a;
    return 0;
#endif
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

typedef struct { /* segments [first, last) of `sequence` and KV heads [head, end_head) for the rows plan.rows[rows ... rows + num_rows) */
    int64_t sequence, head, end_head, rows, num_rows, first, last, low_position, high_position;
} Item;

typedef struct { int64_t folded, end, partials; } Row; /* segments of the first item, and of all; -1: one item, no partials */

typedef struct {
    Item *items;
    Row *by_row;
    int32_t *rows, *merges; /* merges: rows of more than one item */
    float *partials; /* per row and segment (those of its first item folded into one): (num_heads, HEADER + head_dim) */
    int64_t *next; /* per layer: the item to be taken next */
    int64_t num_items, num_rows, num_merges, items_room, rows_room;
} Plan;

static void add_task(Plan *plan, const Step *s, int64_t sequence, int64_t first_row, int64_t num_rows, int64_t first, int64_t last) {
    if (plan->num_items == plan->items_room)
        plan->items = realloc(plan->items, sizeof(Item) * (plan->items_room = 2 * plan->items_room + 64));
    Item item = {sequence, 0, 0, first_row, num_rows, first, last, INT64_MAX, 0};
    for (int64_t i = 0; i < num_rows; i++) {
        Row *row = &plan->by_row[plan->rows[first_row + i]];
        int64_t position = s->positions[plan->rows[first_row + i]];
        item.low_position = min64(item.low_position, position);
        item.high_position = max64(item.high_position, position);
        if (first == 0) row->folded = last;
        row->end = max64(row->end, last);
    }
    plan->items[plan->num_items++] = item;
}

/* The rows of one sequence, from segment `first` on; later rows, which see more keys, come first. */
static void add_sequence(Plan *plan, const Step *s, int64_t sequence, int64_t rows_of_item, int64_t first) {
    int64_t start = s->row_starts[sequence], end = s->row_starts[sequence + 1];
    for (int64_t row = start + (end - start - 1) / rows_of_item * rows_of_item; row >= start; row -= rows_of_item) {
        int64_t n = min64(rows_of_item, end - row), last = ceil_div(s->positions[row + n - 1] + 1, SEGMENT);
        if (first < last) add_task(plan, s, sequence, row, n, first, last);
    }
}

typedef struct { const int32_t *table; int64_t sequence, segments, shared; } Sharer; /* whole segments; shared with the one before */

static __thread int64_t table_blocks; /* what qsort cannot pass on */

static int by_table(const void *a, const void *b) {
    const Sharer *x = a, *y = b;
    for (int64_t i = 0; i < table_blocks; i++)
        if (x->table[i] != y->table[i]) return x->table[i] < y->table[i] ? -1 : 1;
    return x->sequence < y->sequence ? -1 : 1;
}

/* Items of the sharers [l, r), who have all segments before `first` behind them. */
static void add_shared(Plan *plan, const Step *s, const Sharer *sharers, int64_t l, int64_t r, int64_t rows_of_item, int64_t first) {
    if (r - l == 1) {
        add_sequence(plan, s, sharers[l].sequence, rows_of_item, first);
        return;
    }
    int64_t common = INT64_MAX, start = l;
    for (int64_t i = l + 1; i < r; i++) common = min64(common, sharers[i].shared);
    if (common > first) {
        int64_t num_rows = 0;
        for (int64_t i = l; i < r; i++) num_rows += s->row_starts[sharers[i].sequence + 1] - s->row_starts[sharers[i].sequence];
        if (plan->num_rows + num_rows > plan->rows_room)
            plan->rows = realloc(plan->rows, sizeof(int32_t) * (plan->rows_room = 2 * (plan->num_rows + num_rows)));
        int64_t begin = plan->num_rows;
        for (int64_t i = l; i < r; i++)
            for (int32_t row = s->row_starts[sharers[i].sequence]; row < s->row_starts[sharers[i].sequence + 1]; row++)
                plan->rows[plan->num_rows++] = row;
        for (int64_t i = 0; i < num_rows; i += rows_of_item)
            add_task(plan, s, sharers[l].sequence, begin + i, min64(rows_of_item, num_rows - i), first, common);
        first = common;
    }
    for (int64_t i = l + 1; i <= r; i++)
        if (i == r || sharers[i].shared <= first) {
            add_shared(plan, s, sharers, start, i, rows_of_item, first);
            start = i;
        }
}

/* Items of every task: at least four pieces a thread where there is enough to split. The KV heads of a block lie together: where
   there are pieces enough, one thread takes all heads of a few rows, as many threads in the same pages keep memory waiting. */
static void split_tasks(Plan *plan, int64_t kv_heads, int64_t most_rows, int64_t threads) {
    int64_t work = 0, share = INT64_MAX, pieces = 0, n = plan->num_items;
    Item *tasks = plan->items;
    for (int64_t i = 0; i < n; i++) work += (tasks[i].last - tasks[i].first) * kv_heads;
    if (n * kv_heads < 8 * threads) share = max64(MIN_SPLIT, ceil_div(work, 4 * threads));
    for (int64_t i = 0; i < n; i++) pieces += share == INT64_MAX ? 1 : ceil_div(tasks[i].last - tasks[i].first, share);
    plan->items = malloc(sizeof(Item) * (pieces * kv_heads + 1));
    plan->num_items = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t size = min64(share, tasks[i].last - tasks[i].first);
        int64_t heads = pieces >= 4 * threads && tasks[i].num_rows <= most_rows ? kv_heads : 1;
        for (int64_t r = 0; r < tasks[i].num_rows && tasks[i].first == 0; r++) plan->by_row[plan->rows[tasks[i].rows + r]].folded = size;
        for (int64_t head = 0; head < kv_heads; head += heads)
            for (int64_t first = tasks[i].first; first < tasks[i].last; first += size) {
                Item item = tasks[i];
                item.head = head;
                item.end_head = head + heads;
                item.first = first;
                item.last = min64(first + size, tasks[i].last);
                plan->items[plan->num_items++] = item;
            }
    }
    free(tasks);
}

static Plan make_plan(const Attention *a, const Step *s, int64_t threads, int64_t layers) {
    int64_t group = a->num_heads / a->num_kv_heads, rows_of_item = max64(1, MAX_QUERIES / group), num_sharers = 0, partials = 0;
    Plan plan = {.num_rows = s->num_tokens, .rows_room = 2 * s->num_tokens, .next = calloc(layers, sizeof(int64_t))};
    plan.rows = malloc(sizeof(int32_t) * plan.rows_room);
    plan.by_row = calloc(s->num_tokens, sizeof(Row));
    for (int64_t i = 0; i < s->num_tokens; i++) plan.rows[i] = (int32_t)i;
    Sharer *sharers = malloc(sizeof(Sharer) * s->num_sequences);
    for (int64_t i = 0; i < s->num_sequences; i++) {
        int64_t num_rows = s->row_starts[i + 1] - s->row_starts[i];
        if (num_rows > rows_of_item) add_sequence(&plan, s, i, rows_of_item, 0); /* enough arithmetic for what it reads */
        else if (num_rows)
            sharers[num_sharers++] = (Sharer){s->block_tables + i * s->max_blocks, i, (s->positions[s->row_starts[i]] + 1) / SEGMENT, 0};
    }
    table_blocks = s->max_blocks;
    qsort(sharers, num_sharers, sizeof(Sharer), by_table);
    for (int64_t i = 1; i < num_sharers; i++) {
        int64_t most = min64(sharers[i].segments, sharers[i - 1].segments), blocks = 0;
        int64_t wanted = ceil_div(most * SEGMENT, s->block_size);
        while (blocks < wanted && sharers[i].table[blocks] == sharers[i - 1].table[blocks]) blocks++;
        sharers[i].shared = min64(most, blocks * s->block_size / SEGMENT);
    }
    if (num_sharers) add_shared(&plan, s, sharers, 0, num_sharers, rows_of_item, 0);
    free(sharers);
    split_tasks(&plan, a->num_kv_heads, is_tiled(a) ? 0 : max64(MAX_QUERIES, a->num_heads) / a->num_heads, threads);
    plan.merges = malloc(sizeof(int32_t) * (s->num_tokens + 1));
    for (int64_t i = 0; i < s->num_tokens; i++) {
        Row *row = &plan.by_row[i];
        row->partials = row->folded < row->end ? partials : -1;
        if (row->partials < 0) continue;
        partials += (row->end - row->folded + 1) * a->num_heads * (a->head_dim + HEADER);
        plan.merges[plan.num_merges++] = (int32_t)i;
    }
    if (partials) plan.partials = malloc(sizeof(float) * partials);
    return plan;
}

static void free_plan(Plan plan) {
    free(plan.items);
    free(plan.by_row);
    free(plan.rows);
    free(plan.merges);
    free(plan.partials);
    free(plan.next);
}
