#include "kernels.h"
#ifdef HAS_X86_VARIANTS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512,avx512vnni,avx2,fma")
#define VARIANT noria_avx512vnni
#define VARIANT_NAME "avx512vnni"
#include "variant.h"
#endif
