// Vectors of different types convert only explicitly.
// expect: convert|conversion|initialize|incompatible
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float4 wide = float4(rows[lane]);
  half4 narrow = wide;
  rows[lane] = float(narrow.x);
}
