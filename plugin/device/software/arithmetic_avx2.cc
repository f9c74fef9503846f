// x86 with AVX2, FMA and F16C. Compiled with those; called only where the CPU has them.
#include <immintrin.h>

#include "plugin/device/software/arithmetic.h"

namespace jfm {
namespace {

void MultiplyAccumulateAvx2(const float* a, const float* b, float* c) {
  __m256 rows[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_load_ps(c + i * 8);
  for (int k = 0; k < 8; ++k) {
    const __m256 bk = _mm256_load_ps(b + k * 8);
    for (int i = 0; i < 8; ++i) {
      rows[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + i * 8 + k), bk, rows[i]);
    }
  }
  for (int i = 0; i < 8; ++i) _mm256_store_ps(c + i * 8, rows[i]);
}

float HalfToFloat(uint16_t h) { return _cvtsh_ss(h); }
uint16_t FloatToHalf(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace

const Arithmetic kAvx2Arithmetic = {&MultiplyAccumulateAvx2, &HalfToFloat, &FloatToHalf};

}  // namespace jfm
