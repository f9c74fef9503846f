// The vector functions of one instruction set over arrays, for test_cpu_math.py.
#define JFM_ISA math
#include "plugin/cpu/scores.h"

namespace math = jfm::cpu::math;

template <class Function>
static void Apply(const float* x, float* y, long count, Function function) {
  for (long i = 0; i + math::kWidth <= count; i += math::kWidth) {
    math::Store(y + i, function(math::Load(x + i)));
  }
}

extern "C" void exp2_of(const float* x, float* y, long count) {
  Apply(x, y, count, [](math::V v) { return math::Exp2(v); });
}
extern "C" void tanh_of(const float* x, float* y, long count) {
  Apply(x, y, count, [](math::V v) { return math::Tanh(v); });
}
// Rounded to 16 bits and back.
extern "C" void bfloat16_of(const float* x, float* y, long count) {
  Apply(x, y, count, [](math::V v) { return math::FromBfloat16(math::ToBfloat16(v)); });
}
extern "C" void float16_of(const float* x, float* y, long count) {
  Apply(x, y, count, [](math::V v) { return math::FromFloat16(math::ToFloat16(v)); });
}
