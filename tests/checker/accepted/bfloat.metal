// bfloat: widened implicitly, narrowed explicitly.
#include <metal_stdlib>

using namespace metal;

METAL_FUNC float square(float x) { return x * x; }

[[kernel]] void square_rows(device const bfloat* in [[buffer(0)]],
                            device bfloat* out [[buffer(1)]],
                            uint lane [[thread_index_in_simdgroup]]) {
  bfloat x = in[lane];
  float wide = x;
  out[lane] = bfloat(square(x) + wide);
  out[lane + 32] = static_cast<bfloat>(2.0f * wide);
  out[lane + 64] = x;
}
