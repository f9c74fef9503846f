// Two arrays fit alone but not together.
// expect: bytes of threadgroup memory
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float keys[64 * 80];
  threadgroup half4 values[64 * 40];
  keys[lane] = rows[lane];
  values[lane] = half4(half(keys[lane]));
  rows[lane] = float(values[lane].x);
}
