#include "kernels.h"
#ifdef HAS_X86_VARIANTS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512,avx512vnni,avx512bf16,avx2,fma")
#define VARIANT noria_avx512bf16
#define VARIANT_NAME "avx512bf16"
#include "variant.h"
#endif
