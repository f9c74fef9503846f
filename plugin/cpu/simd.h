// Vectors of the instruction set that the including file is compiled for. Included by
// kernels_*.cc only, in a namespace of their own each.
//
// Those files are compiled with flags of an instruction set, so nothing in them may have
// linkage that the linker merges: no templates or inline functions of the standard library, or
// the copy with AVX-512 in it could be the one that every other file gets. Everything here is
// in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined values in its own header for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef JFM_ISA
#error "the including file names its instruction set: #define JFM_ISA avx2"
#endif

#if defined(__clang__)
#define JFM_CPU_UNROLL _Pragma("clang loop unroll(full)")
#else
#define JFM_CPU_UNROLL _Pragma("GCC unroll 32")
#endif
#define JFM_CPU_INLINE inline __attribute__((always_inline))

namespace jfm::cpu::JFM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// float32, and 32-bit integers of as many lanes. Comparisons give -1 or 0 per lane.
typedef float V __attribute__((vector_size(4 * kWidth)));
typedef int32_t I __attribute__((vector_size(4 * kWidth)));
typedef uint32_t U __attribute__((vector_size(4 * kWidth)));
typedef uint16_t U16 __attribute__((vector_size(2 * kWidth)));
typedef uint8_t U8 __attribute__((vector_size(kWidth)));

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;
constexpr float kInfinity = __builtin_inff();

// ---- moves

template <class T>
JFM_CPU_INLINE T LoadAs(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
JFM_CPU_INLINE V Load(const float* p) { return LoadAs<V>(p); }
JFM_CPU_INLINE void Store(float* p, V x) { std::memcpy(p, &x, sizeof(x)); }
// Of any bits: nothing is computed with them.
JFM_CPU_INLINE V Broadcast(float x) {
#if defined(__AVX512F__)
  return (V)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (V)_mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}
JFM_CPU_INLINE I BroadcastInt(int32_t x) { return x - I{}; }
JFM_CPU_INLINE U BitsOf(V x) { return (U)x; }
JFM_CPU_INLINE V FromBits(U x) { return (V)x; }
JFM_CPU_INLINE uint32_t BitsOf(float x) { return LoadAs<uint32_t>(&x); }
JFM_CPU_INLINE V Select(I condition, V yes, V no) {
  return FromBits(((U)condition & BitsOf(yes)) | (~(U)condition & BitsOf(no)));
}

// 0, 1, 2 …
JFM_CPU_INLINE I Lanes() {
  I x;
  JFM_CPU_UNROLL for (int i = 0; i < kWidth; ++i) x[i] = i;
  return x;
}

// ---- arithmetic

// a * b + c; one rounding where the instruction set has it.
JFM_CPU_INLINE V Fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The larger one; b if either is NaN.
JFM_CPU_INLINE V Max(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return Select(a > b, a, b);
#endif
}
// The smaller one; b if either is NaN.
JFM_CPU_INLINE V Min(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return Select(a < b, a, b);
#endif
}

JFM_CPU_INLINE bool IsFinite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }
JFM_CPU_INLINE I IsFinite(V x) { return (I)((BitsOf(x) & 0x7f800000u) != 0x7f800000u); }
// By its bits: also where a compiler thinks that there are none.
JFM_CPU_INLINE I IsNaN(V x) { return (I)((BitsOf(x) & 0x7fffffffu) > 0x7f800000u); }

// Over the lanes, in a fixed order. NaN lanes of Max may get lost.
JFM_CPU_INLINE float ReduceMax(V x) {
  float lanes[kWidth];
  Store(lanes, x);
  JFM_CPU_UNROLL for (int n = kWidth / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  }
  return lanes[0];
}
JFM_CPU_INLINE float ReduceSum(V x) {
#if defined(__AVX512F__)
  const __m512 v = (__m512)x;
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), high);
#elif defined(__AVX2__)
  const __m256 half = (__m256)x;
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  quarter = _mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1));
  return _mm_cvtss_f32(quarter);
#else
  float lanes[kWidth];
  Store(lanes, x);
  JFM_CPU_UNROLL for (int n = kWidth / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  }
  return lanes[0];
#endif
}

// 2^x with a relative error below 2e-7; 0 below -126.5, inf from 127.5 on, NaN for NaN. The
// polynomial is the minimax one of 2^x - 1 on [-1/2, 1/2], which is 2e-9 off; roundings do the
// rest.
JFM_CPU_INLINE V Exp2(V x) {
  // Operands in this order: a NaN stays.
  x = Min(Broadcast(128.0f), Max(Broadcast(-127.0f), x));
  // To the nearest integer, by the last bits of a large float.
  const V magic = Broadcast(12582912.0f);  // 1.5 * 2^23
  const V shifted = x + magic;
  const V r = x - (shifted - magic);
  V p = Broadcast(0.0001535336196f);
  p = Fma(p, r, Broadcast(0.001339887502f));
  p = Fma(p, r, Broadcast(0.009618436918f));
  p = Fma(p, r, Broadcast(0.05550332367f));
  p = Fma(p, r, Broadcast(0.2402264774f));
  p = Fma(p, r, Broadcast(0.6931471825f));
  p = Fma(p, r, Broadcast(1.0f));
  // The exponent's bits of 2^n: 127 and the integer, which the last bits of `shifted` hold.
  return p * FromBits((BitsOf(shifted) + 127u) << 23);
}

// ---- 16-bit numbers

// 1 / 16 of them each, as raw bits.
JFM_CPU_INLINE U Widen(U16 x) { return __builtin_convertvector(x, U); }

JFM_CPU_INLINE V FromBfloat16(U16 x) { return FromBits(Widen(x) << 16); }

// Rounds to nearest even; NaN stays NaN.
JFM_CPU_INLINE U16 ToBfloat16(V x) {
  const U bits = BitsOf(x);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = (bits >> 16) | 0x40u;
  const U is_nan = (U)IsNaN(x);
  return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), U16);
}

JFM_CPU_INLINE V FromFloat16(U16 x) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__)
  return (V)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (V)vcvt_f32_f16((float16x4_t)x);
#else
  const U half = Widen(x);
  U bits = ((half & 0x7fffu) << 13) + (112u << 23);
  const U exponent = half & 0x7c00u;
  bits += (U)(exponent == 0x7c00u) & (112u << 23);  // inf and NaN
  // A subnormal has no leading 1: one is added and taken off again.
  const U is_subnormal = (U)(exponent == 0u);
  const V subnormal = FromBits(bits + (1u << 23)) - FromBits(U{} + (113u << 23));
  bits = (is_subnormal & BitsOf(subnormal)) | (~is_subnormal & bits);
  return FromBits(bits | ((half & 0x8000u) << 16));
#endif
}

// Rounds to nearest even.
JFM_CPU_INLINE U16 ToFloat16(V x) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (U16)vcvt_f16_f32((float32x4_t)x);
#else
  const U bits = BitsOf(x) & 0x7fffffffu;
  const U sign = (BitsOf(x) >> 16) & 0x8000u;
  // Normal numbers: rebias and round; those that round up to 2^16 become inf.
  U normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const U too_large = (U)(bits >= 0x477ff000u);
  const U nan = (U)(bits > 0x7f800000u);
  normal = (too_large & 0x7c00u) | (~too_large & normal);
  normal = (nan & 0x7e00u) | (~nan & normal);
  // Subnormal ones: adding 1/2 puts the digits where they belong, rounded.
  const U subnormal = BitsOf(FromBits(bits) + Broadcast(0.5f)) - 0x3f000000u;
  const U is_subnormal = (U)(bits < (113u << 23));
  const U half = (is_subnormal & subnormal) | (~is_subnormal & normal);
  return __builtin_convertvector(half | sign, U16);
#endif
}

// ---- transposition

#if defined(__AVX512F__)
#define JFM_CPU_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define JFM_CPU_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define JFM_CPU_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define JFM_CPU_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define JFM_CPU_LOW 0, 4, 1, 5
#define JFM_CPU_HIGH 2, 6, 3, 7
#endif

// A square of kWidth rows, in place: a perfect shuffle of the rows per bit of the width.
JFM_CPU_INLINE void Transpose(V (&rows)[kWidth]) {
  V next[kWidth];
  JFM_CPU_UNROLL for (int bit = 1; bit < kWidth; bit *= 2) {
    JFM_CPU_UNROLL for (int i = 0; i < kWidth / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + kWidth / 2], JFM_CPU_LOW);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kWidth / 2], JFM_CPU_HIGH);
    }
    JFM_CPU_UNROLL for (int i = 0; i < kWidth; ++i) rows[i] = next[i];
  }
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
