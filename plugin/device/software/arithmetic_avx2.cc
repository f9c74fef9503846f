// x86 with AVX2, FMA and F16C. Compiled with those; called only where the CPU has them.
#include <immintrin.h>

#include "plugin/device/software/arithmetic.h"

namespace jfm {
namespace {

__m256 LoadRow(const float (&matrix)[MSL_SIMD_WIDTH][2], uint32_t row) {
  const uint32_t lane = FirstLane(row);
  return _mm256_set_m128(_mm_load_ps(matrix[lane + 8]), _mm_load_ps(matrix[lane]));
}

__m128 LoadSums(MslAccumulator* const* sum) {
  const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<__m128i*>(sum[0])));
  return _mm_loadh_pi(low, reinterpret_cast<__m64*>(sum[1]));
}

void StoreSums(MslAccumulator* const* sum, __m128 values) {
  _mm_storel_pi(reinterpret_cast<__m64*>(sum[0]), values);
  _mm_storeh_pi(reinterpret_cast<__m64*>(sum[1]), values);
  --sum[0]->pending;
  --sum[1]->pending;
}

void RunProductAvx2(const Product& product) {
  __m256 b[8];
  for (uint32_t k = 0; k < 8; ++k) b[k] = LoadRow(product.b, k);
  for (uint32_t row = 0; row < 8; ++row) {
    const uint32_t lane = FirstLane(row);
    MslAccumulator* const* sum = product.sum + lane;
    const float* a = product.a[lane];
    __m256 x = _mm256_set_m128(LoadSums(sum + 8), LoadSums(sum));
    for (int k = 0; k < 4; ++k) x = _mm256_fmadd_ps(_mm256_broadcast_ss(a + k), b[k], x);
    for (int k = 0; k < 4; ++k) x = _mm256_fmadd_ps(_mm256_broadcast_ss(a + 16 + k), b[4 + k], x);
    StoreSums(sum, _mm256_castps256_ps128(x));
    StoreSums(sum + 8, _mm256_extractf128_ps(x, 1));
  }
}

float HalfToFloat(uint16_t h) { return _cvtsh_ss(h); }
uint16_t FloatToHalf(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace

const Arithmetic kAvx2Arithmetic = {&RunProductAvx2, &HalfToFloat, &FloatToHalf};

}  // namespace jfm
