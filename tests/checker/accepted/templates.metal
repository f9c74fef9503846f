// A kernel template with host names, used for three dtypes, and template helpers.
#include <metal_stdlib>

using namespace metal;

template <typename T, int COUNT>
METAL_FUNC constexpr int padded() {
  return COUNT + 16 / int(sizeof(T));
}

template <typename T>
METAL_FUNC float load(device const T* rows, uint index) {
  return float(rows[index]);
}

template <typename T, int HEAD_DIM>
[[kernel]] void scale_rows(device const T* in [[buffer(0)]], device T* out [[buffer(1)]],
                           constant float& scale [[buffer(2)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  static_assert(HEAD_DIM % 8 == 0, "whole fragments");
  threadgroup T tile[padded<T, HEAD_DIM>()];
  for (uint i = lane; i < uint(HEAD_DIM); i += 32) tile[i] = T(load(in, i) * scale);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < uint(HEAD_DIM); i += 32) out[i] = tile[HEAD_DIM - 1 - i];
}

template [[host_name("scale_rows_float32_d64")]] [[kernel]] decltype(scale_rows<float, 64>) scale_rows<float, 64>;
template [[host_name("scale_rows_float16_d64")]] [[kernel]] decltype(scale_rows<half, 64>) scale_rows<half, 64>;
template [[host_name("scale_rows_bfloat16_d64")]] [[kernel]] decltype(scale_rows<bfloat, 64>) scale_rows<bfloat, 64>;
