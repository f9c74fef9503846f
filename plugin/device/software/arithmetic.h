// The arithmetic of the software device that profits from newer CPUs: the 8x8 matrix
// product and the half conversions, one implementation per instruction set.
#pragma once

#include <cstdint>

#include "plugin/device/software/frontend/msl_abi.h"

namespace jfm {

// A simdgroup_multiply_accumulate of a whole simdgroup: every lane's two elements of a and
// b, and where its two of the sum lie.
struct Product {
  alignas(32) float a[MSL_SIMD_WIDTH][2];
  alignas(32) float b[MSL_SIMD_WIDTH][2];
  MslAccumulator* sum[MSL_SIMD_WIDTH];
};

// The lane that holds the first elements of a row; three more follow after 1, 8 and 9.
constexpr uint32_t FirstLane(uint32_t row) { return (row & 4) << 2 | (row & 3) << 1; }

// sum += a · b, every element a chain of eight fused multiply-adds. One less is pending.
using RunProduct = void (*)(const Product& product);

struct Arithmetic {
  RunProduct run_product;
  float (*half_to_float)(uint16_t);
  uint16_t (*float_to_half)(float);
};

extern const Arithmetic kBaselineArithmetic;
#if defined(__x86_64__)
extern const Arithmetic kAvx2Arithmetic;
#endif

// The one for this CPU.
const Arithmetic& ThisArithmetic();

}  // namespace jfm
