// Threadgroup arrays of scalars, vectors and two dimensions, helpers that get pointers.
#include <metal_stdlib>

using namespace metal;

METAL_FUNC float sum_of(threadgroup const float* tile, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += tile[i];
  return sum;
}

[[kernel]] void row_sums(device const float* rows [[buffer(0)]],
                         device float* sums [[buffer(1)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tile[8][32];
  threadgroup half4 packed[32];
  threadgroup uint found;
  tile[simdgroup][lane] = rows[group.x * 256 + simdgroup * 32 + lane];
  packed[lane] = half4(half(tile[simdgroup][lane]));
  if (lane == 0 && simdgroup == 0) found = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) sums[simdgroup] = sum_of(tile[simdgroup], 32) + float(packed[0].x) + float(found);
}
