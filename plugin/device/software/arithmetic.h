// The arithmetic of the software device that profits from newer CPUs: the 8x8 matrix
// product and the half conversions, one implementation per instruction set.
#pragma once

#include <cstdint>

namespace jfm {

// c = a · b + c, row-major 8x8, every element a chain of eight fused multiply-adds.
using MultiplyAccumulate = void (*)(const float* a, const float* b, float* c);

struct Arithmetic {
  MultiplyAccumulate multiply_accumulate;
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
