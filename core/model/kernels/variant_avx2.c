#include "kernels.h"
#ifdef HAS_X86_VARIANTS
#pragma GCC target("avx2,fma")
#define VARIANT noria_avx2
#define VARIANT_NAME "avx2"
#include "variant.h"
#endif
