// A device pointer is cast to the threadgroup space.
// expect: address space|different address
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float* tile = (threadgroup float*)rows;
  rows[lane] = tile[0];
}
