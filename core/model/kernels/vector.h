/* Vectors of VL floats in GCC's vector extension, and the few functions of them that the kernels need. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VL = 16 };
#elif defined(__AVX2__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif
typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef int16_t vs __attribute__((vector_size(VL * 4)));
typedef int8_t vb __attribute__((vector_size(VL * 4)));
typedef uint16_t u16;
typedef u16 halves __attribute__((vector_size(VL * 2)));
typedef uint8_t bytes __attribute__((vector_size(VL)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define FETCH(p) __builtin_prefetch(p, 0, 2) /* into the second-level cache, which waits for more lines at once than the first */

INLINE float up(u16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE u16 down(float f) { /* to nearest even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (u16)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 64 : rounded);
}

INLINE float get(const void *p, int64_t i, int dtype) { return dtype == BF16 ? up(((const u16 *)p)[i]) : ((const float *)p)[i]; }

INLINE void put(void *p, int64_t i, float x, int dtype) {
    if (dtype == BF16) ((u16 *)p)[i] = down(x);
    else ((float *)p)[i] = x;
}

INLINE int64_t width(int64_t dtype) { return dtype == INT8 ? 1 : dtype == BF16 ? 2 : 4; }
INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu uload(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf fill(float x) { return (vf){0} + x; }
INLINE vf select_if(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf vmax(vf a, vf b) { /* b where one is NaN */
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select_if(a > b, a, b);
#endif
}
INLINE vi iota(void) { vi v; UNROLL for (int i = 0; i < VL; i++) v[i] = i; return v; }

INLINE vi to_nearest(vf x) { /* ties to even, whatever the compiler fuses */
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (vi)_mm_cvtps_epi32((__m128)x);
#else
    return (vi)(x + 12582912.0f) - 0x4b400000; /* 1.5 * 2^23 */
#endif
}

/* VL elements from p + i on, and to there; the conversions are those of `up` and `down`. */
INLINE vf get_vector(const void *p, int64_t i, int dtype) {
    if (dtype == F32) return vload((const float *)p + i);
    halves h;
    memcpy(&h, (const u16 *)p + i, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

INLINE void put_vector(void *p, int64_t i, vf x, int dtype) {
    if (dtype == F32) { vstore((float *)p + i, x); return; }
#ifdef __AVX512BF16__
    __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)x); /* what is below the normal numbers becomes 0 */
    memcpy((u16 *)p + i, &narrow, sizeof narrow);
    return;
#endif
    vu u = (vu)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    halves h = __builtin_convertvector((vu)select_if(x == x, (vf)rounded, (vf)((u >> 16) | 64)), halves);
    memcpy((u16 *)p + i, &h, sizeof h);
}

INLINE vu words(uint32_t x) { return (vu){0} + x; }

/* sum + the products of the 4 unsigned bytes of each lane of x with the 4 signed bytes of w's, exactly. */
INLINE vi dot_bytes(vi sum, vu x, vi w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else
    vs low = ((vs)w << 8) >> 8, high = (vs)w >> 8;
    vi even = (vi)(x & 0x00ff00ffu), odd = (vi)((x >> 8) & 0x00ff00ffu);
#if defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)low, (__m512i)even) + (vi)_mm512_madd_epi16((__m512i)high, (__m512i)odd);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)low, (__m256i)even) + (vi)_mm256_madd_epi16((__m256i)high, (__m256i)odd);
#elif defined(__SSE2__)
    return sum + (vi)_mm_madd_epi16((__m128i)low, (__m128i)even) + (vi)_mm_madd_epi16((__m128i)high, (__m128i)odd);
#else
    vi a = (vi)low, b = (vi)high;
    return sum + ((a << 16) >> 16) * (even & 255) + ((b << 16) >> 16) * (odd & 255) + (a >> 16) * (even >> 16) + (b >> 16) * (odd >> 16);
#endif
#endif
}

/* Sums and maxima over lanes, always in the same order. */
INLINE float lane_sum(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float part[VL];
    vstore(part, v);
    for (int n = VL / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
#endif
}

INLINE float lane_max(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    UNROLL for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

/* e^x within 2 ulp (Cephes' polynomial), 0 below -87; our own so that it vectorises and is the same in every libc. */
INLINE vf vexp(vf x) {
    vf clamped = select_if(x > 88.0f, x - x + 88.0f, select_if(x < -87.0f, (vf){0} - 87.0f, x));
    vf n = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    vi exponent = (vi)n << 23;
    n -= 12582912.0f;
    vf r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = (((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f) * r * r + r + 1.0f;
    y = (vf)((vi)y + exponent);
    return select_if(x < -87.0f, (vf){0}, y);
}

/* 2^x for x up to 127, within 2 ulp, by minimax polynomial; less than -126 is about 0. NaN stays NaN. `coarse`: within 1e-4,
   for a result that bf16 rounds more. */
INLINE vf vexp2(vf x, const int coarse) {
#ifdef __AVX512F__
    vf n = (vf)_mm512_roundscale_ps((__m512)x, 8);
#else
    x = vmax((vf){0} - 126.0f, x);
    vf n = x + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    vi exponent = (vi)n << 23;
    n -= 12582912.0f;
#endif
    vf r = x - n, y = coarse ? ((5.5008931e-02f * r + 2.4221097e-01f) * r + 6.9328293e-01f) * r + 1.0f
        : ((((1.3264727e-3f * r + 9.6715128e-3f) * r + 5.5507337e-2f) * r + 2.4022242e-1f) * r + 6.9314698e-1f) * r + 1.0f;
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    return (vf)((vi)y + exponent);
#endif
}

/* x / (1 + e^-x), within 3 ulp; below -69 about 0. NaN stays NaN. */
INLINE vf silu(vf x) {
#ifdef __AVX512F__
    vf below = 1.0f + vexp2((vf)_mm512_min_ps((__m512)((vf){0} + 100.0f), (__m512)(x * -1.44269504f)), 0);
    vf inverse = (vf)_mm512_rcp14_ps((__m512)below);
    return x * (inverse * (2.0f - below * inverse));
#else
    return x / (1.0f + vexp(-x));
#endif
}

/* n elements from `at` on, of either dtype, as floats. */
INLINE void widen(const void *from, int64_t at, int64_t n, int64_t dtype, float *to) {
    if (dtype == BF16) for (int64_t i = 0; i < n; i++) to[i] = get(from, at + i, BF16);
    else memcpy(to, (const float *)from + at, n * sizeof(float));
}

/* n floats as elements from `at` on, of either dtype. */
INLINE void narrow(const float *from, int64_t n, int64_t dtype, void *to, int64_t at) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) put_vector(to, at + i, vload(from + i), (int)dtype);
    for (; i < n; i++) put(to, at + i, from[i], (int)dtype);
}

/* VL rows of VL words, transposed in place: log2(VL) rounds of zipping row i with row i + VL / 2. */
#ifdef __AVX512F__
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
INLINE void transpose(vu a[VL]) {
    UNROLL for (int round = 1; round < VL; round *= 2) {
        vu b[VL];
        UNROLL for (int i = 0; i < VL / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + VL / 2], LOW);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + VL / 2], HIGH);
        }
        UNROLL for (int i = 0; i < VL; i++) a[i] = b[i];
    }
}

/* 2 * VL elements as two vectors: bf16 as the even and the odd ones (one operation each), f32 as the first and the last. */
INLINE void load_pair(const char *p, int dtype, vf *a, vf *b) {
    if (dtype == BF16) {
        vu u = uload(p);
        *a = (vf)(u << 16);
        *b = (vf)(u & 0xffff0000u);
    } else {
        *a = vload((const float *)p);
        *b = vload((const float *)p + VL);
    }
}
