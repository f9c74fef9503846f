// 8x8 matrices, their elements, shuffles and reductions.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

typedef simdgroup_matrix<float, 8, 8> Fragment;

METAL_FUNC Fragment zero() { return make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }

METAL_FUNC bool sanitize(thread Fragment& operand) {
  const float x = operand.thread_elements()[0];
  operand.thread_elements()[0] = isnan(x) ? 0.0f : x;
  return isnan(x);
}

[[kernel]] void product(device const float* a [[buffer(0)]], device float* c [[buffer(1)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  Fragment left = zero();
  Fragment sum[2];
  for (int i = 0; i < 2; ++i) sum[i] = zero();
  left.thread_elements()[0] = a[lane];
  const bool found = sanitize(left);
  simdgroup_multiply_accumulate(sum[0], left, left, sum[0]);
  float x = sum[0].thread_elements()[0];
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  x += simd_sum(x) + simd_shuffle(x, ushort(3));
  if (simd_any(found)) x = as_type<float>(0x7fc00000u);
  c[lane] = exp2(x) + fast::exp2(x) + precise::log2(x);
}
