/* What the compiler's own target has: SSE2 on x86-64, NEON on Arm. */
#define VARIANT noria_plain
#define VARIANT_NAME "plain"
#include "variant.h"
