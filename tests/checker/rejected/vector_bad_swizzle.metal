// A float2 has no z.
// expect: vector component|illegal vector|out of|exceeds
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float2 row = float2(1.0f, 2.0f);
  rows[lane] = row.z;
}
