#include "plugin/device/software/arithmetic.h"

#include <cmath>
#include <cstring>

#include "plugin/host_cpu.h"

namespace jfm {
namespace {

// The element in (row, col) of a matrix that is spread over lanes.
const float& Element(const float (&matrix)[MSL_SIMD_WIDTH][2], uint32_t row, uint32_t col) {
  return matrix[FirstLane(row) + (col & 4) * 2 + (col >> 1 & 1)][col & 1];
}

void RunProductBaseline(const Product& product) {
  for (uint32_t row = 0; row < 8; ++row) {
    for (uint32_t pair = 0; pair < 4; ++pair) {
      const uint32_t lane = FirstLane(row) + (pair & 2) * 4 + (pair & 1);
      MslAccumulator& sum = *product.sum[lane];
      for (uint32_t e = 0; e < 2; ++e) {
        for (uint32_t k = 0; k < 8; ++k) {
          sum.elements[e] = std::fma(Element(product.a, row, k),
                                     Element(product.b, k, pair * 2 + e), sum.elements[e]);
        }
      }
      --sum.pending;
    }
  }
}

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float HalfToFloat(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) {  // infinity or (made quiet) NaN
    return FromBits(sign | 0x7f800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa · 2^-24
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return FromBits(sign | Bits(magnitude));
  }
  return FromBits(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Round to nearest, ties to even.
uint16_t FloatToHalf(float x) {
  const uint32_t bits = Bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: subnormal
    // Adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the FPU.
    const float shifted = FromBits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (Bits(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace

const Arithmetic kBaselineArithmetic = {&RunProductBaseline, &HalfToFloat, &FloatToHalf};

const Arithmetic& ThisArithmetic() {
#if defined(__x86_64__)
  static const bool has_avx2 = DetectCpuFeatures().avx2;
  if (has_avx2) return kAvx2Arithmetic;
#endif
  return kBaselineArithmetic;
}

}  // namespace jfm

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using Bfloat = _Float16;  // returned in the same register as __bf16, which GCC 13 brought
#else
using Bfloat = __bf16;
#endif

// What clang calls to round a float to bfloat16; no compiler runtime of ours has it.
// Ties to even; a NaN stays one.
extern "C" Bfloat __truncsfbf2(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1);
  const uint16_t high = static_cast<uint16_t>(rounded >> 16);
  Bfloat result;
  std::memcpy(&result, &high, 2);
  return result;
}

#if defined(__x86_64__)
// What clang calls for `half` in kernels compiled for the baseline; aarch64 has
// instructions. A direct pointer, since a kernel converts every element it loads.
namespace {
const jfm::Arithmetic& kArithmetic = jfm::ThisArithmetic();
}  // namespace

extern "C" float __extendhfsf2(_Float16 x) {
  uint16_t bits;
  std::memcpy(&bits, &x, 2);
  return kArithmetic.half_to_float(bits);
}

extern "C" _Float16 __truncsfhf2(float x) {
  const uint16_t bits = kArithmetic.float_to_half(x);
  _Float16 h;
  std::memcpy(&h, &bits, 2);
  return h;
}
#endif
