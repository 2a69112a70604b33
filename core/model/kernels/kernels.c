/* Picks the instruction set once and passes calls on. The same sources are compiled once per set (variant_*.c). */
#include "kernels.h"
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static const Variant *chosen = &noria_plain;

static int is_supported(const Variant *variant) {
#ifdef HAS_X86_VARIANTS
    int has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int hasvnni = has512 && __builtin_cpu_supports("avx512vnni");
    if (variant == &noria_avx512bf16) return hasvnni && __builtin_cpu_supports("avx512bf16");
    if (variant == &noria_avx512vnni) return hasvnni;
    if (variant == &noria_avx512) return has512;
    if (variant == &noria_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return variant == &noria_plain;
}

/* The best variant for "", else the one of that name; its name, or NULL where this processor lacks it. */
EXPORT const char *noria_select(const char *name) {
    static const Variant *const all[] = {
#ifdef HAS_X86_VARIANTS
        &noria_avx512bf16, &noria_avx512vnni, &noria_avx512, &noria_avx2,
#endif
        &noria_plain};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
        if ((*name && strcmp(name, all[i]->name)) || !is_supported(all[i])) continue;
        chosen = all[i];
        return chosen->name;
    }
    return 0;
}

EXPORT void noria_forward(const Model *model, const Step *step, const Scratch *scratch) { chosen->forward(model, step, scratch); }

EXPORT void noria_attend(const Attention *attention, const Step *step, const void *query, int64_t query_stride, void *out) {
    chosen->attend(attention, step, query, query_stride, out);
}

EXPORT void noria_write_kv(const Attention *attention, const Step *step, const void *key, const void *value) {
    chosen->write_kv(attention, step, key, value);
}

EXPORT void noria_linear(const Linear *linear, const void *x, int64_t rows, int64_t dtype, void *out) {
    chosen->linear(linear, x, rows, dtype, out);
}

EXPORT void noria_greedy(const float *logits, int64_t rows, int64_t stride, int64_t valid, int64_t *out) {
    chosen->greedy(logits, rows, stride, valid, out);
}
