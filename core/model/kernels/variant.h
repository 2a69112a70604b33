/* One instruction set's copy of all kernels. Included once by each variant_*.c, after its target pragma. */
#include "kernels.h"
#include "vector.h"
#include "team.h"
#include "plan.h"
#include "amx.h"
#include "attention_tiles.h"
#include "attention_int8.h"
#include "attention_segments.h"
#include "attention.h"
#include "linear.h"
#include "forward.h"

const Variant VARIANT = {VARIANT_NAME, forward, attend, write_kv, linear, greedy};
