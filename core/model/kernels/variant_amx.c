#include "kernels.h"
#ifdef HAS_X86_VARIANTS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8,avx2,fma")
#define VARIANT noria_amx
#define VARIANT_NAME "amx"
#include "variant.h"
#endif
