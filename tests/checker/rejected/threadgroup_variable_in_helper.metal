// Only a kernel can declare threadgroup variables.
// expect: threadgroup variable.*outside a kernel
#include <metal_stdlib>

using namespace metal;

void stage(device float* rows, uint lane) {
  threadgroup float tile[32];
  tile[lane] = rows[lane];
  rows[lane] = tile[31 - lane];
}

[[kernel]] void reverse(device float* rows [[buffer(0)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  stage(rows, lane);
}
