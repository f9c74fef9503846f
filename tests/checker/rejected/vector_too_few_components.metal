// A vector constructor with two of four components.
// expect: vector|component|static_assert|static assertion
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float4 row = float4(1.0f, 2.0f);
  rows[lane] = row.x;
}
