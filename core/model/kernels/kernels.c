/* Picks the instruction set once and passes calls on. The same sources are compiled once per set (variant_*.c). */
#include "kernels.h"
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static const Variant *chosen = &noria_plain;

/* Tiles: the processor's word (CPUID leaf 7: AMX-BF16, AMX-TILE, AMX-INT8), and Linux's permission to use their state. */
static int has_tiles(void) {
#if defined(HAS_X86_VARIANTS) && defined(__linux__)
    unsigned a, b, c, d, wanted = 1u << 22 | 1u << 24 | 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
#else
    return 0;
#endif
}

static int is_supported(const Variant *variant) {
#ifdef HAS_X86_VARIANTS
    int has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int hasvnni = has512 && __builtin_cpu_supports("avx512vnni");
    if (variant == &noria_amx) return hasvnni && __builtin_cpu_supports("avx512bf16") && has_tiles();
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
        &noria_amx, &noria_avx512bf16, &noria_avx512vnni, &noria_avx512, &noria_avx2,
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
