// A vector constructor with one component too many.
// expect: vector|component|static_assert|static assertion
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float2 row = float2(float2(1.0f), 2.0f);
  rows[lane] = row.x;
}
