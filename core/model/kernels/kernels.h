/* What Python and the kernels share: plain structs of pointers and sizes, mirrored in __init__.py. Row-major, no padding.

   dtype 0 is bfloat16 (as uint16), 1 is float32; norms are float32, K, V and the rows between layers have the model's dtype,
   sums and the residual stream are float32. The weights of a linear layer have its own kind: a dtype, or 8 or 4 bits. */
#ifndef NORIA_KERNELS_H
#define NORIA_KERNELS_H
#include <stdint.h>

enum { BF16 = 0, F32 = 1, INT8 = 2, INT4 = 3 };
enum { COLUMNS = 32 }; /* outputs of one packed block of a linear layer */
enum { GROUP_INPUTS = 32 }; /* inputs of an output that share a step and a minimum in 4 bits */
enum { SHIFT_INPUTS = 64 }; /* inputs of a row of x that share an exponent in 8 bits; rows of bytes are padded to it */
enum { SEGMENT = 128 }; /* keys of one partial result of attention, at absolute positions */

typedef struct { /* y = x W^T + bias; W packed by `kind` as
                    [outputs / 32][inputs / 2][32][2] bf16, [outputs / 32][inputs][32] f32, [outputs / 32][inputs / 4][32][4] bytes of int8 + 128, or
                    [outputs / 32][inputs / 8][32][4] bytes, whose low halves are inputs 0 to 3 of the 8 and high halves 4 to 7 */
    const void *weight;
    const float *bias, *scale; /* (outputs,) or NULL; scale of an output's integers, in whole blocks */
    const void *groups; /* 4 bits: [outputs / 32][inputs / 32][32] of a byte step and a byte minimum + 128: int8 + 128 is half * step + that */
    int64_t outputs, inputs, kind;
} Linear;

typedef struct { /* one layer's attention */
    void *key, *value; /* (num_blocks, num_kv_heads, block_size, head_dim) */
    float *key_scale, *value_scale; /* (num_blocks, num_kv_heads, block_size), of a cache of bytes */
    const float *sinks; /* (num_heads,) or NULL */
    int64_t num_heads, num_kv_heads, head_dim, dtype, kept, window; /* kept: the cache's dtype; window 0: all keys */
    float scale, softcap; /* softcap 0: none */
} Attention;

typedef struct { /* layout.StepLayout, with the ids of the step */
    const int64_t *token_ids, *positions, *slots, *logit_rows;
    const int32_t *row_starts, *context_lens, *block_tables;
    int64_t num_tokens, num_sequences, num_logit_rows, max_blocks, block_size;
} Step;

typedef struct {
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two may be NULL */
    Linear qkv, output, gate_up, down; /* gate_up: 16 gates, 16 ups in every 32 outputs */
    Attention attention;
} Layer;

typedef struct {
    const Layer *layers;
    const float *final_norm, *cos, *sin; /* cos, sin: (positions, rotary_dim / 2) */
    const void *embedding; /* (rows, hidden); NULL: the head's weights */
    Linear head;
    int64_t num_layers, hidden, inner, rotary_dim, dtype;
    float epsilon;
} Model;

typedef struct { /* memory of one step, for num_tokens rows (logits: num_logit_rows) */
    float *residual, *logits;
    void *hidden, *qkv, *mixed, *inner, *quantized;
    double *seconds; /* (PARTS,) grows by the time each part took, or NULL */
} Scratch;

enum { PART_NORM, PART_LINEAR, PART_ROPE, PART_ATTENTION, PART_HEAD, PARTS };

typedef struct { /* what every instruction set offers */
    const char *name;
    void (*forward)(const Model *, const Step *, const Scratch *);
    void (*attend)(const Attention *, const Step *, const void *query, int64_t query_stride, void *out);
    void (*write_kv)(const Attention *, const Step *, const void *key, const void *value);
    void (*linear)(const Linear *, const void *x, int64_t rows, int64_t dtype, void *out);
    void (*greedy)(const float *logits, int64_t rows, int64_t stride, int64_t valid, int64_t *out);
} Variant;

extern const Variant noria_plain;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_VARIANTS 1
extern const Variant noria_avx2, noria_avx512, noria_avx512vnni, noria_avx512bf16, noria_amx;
#endif
#endif
