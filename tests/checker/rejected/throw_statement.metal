// Metal has no exceptions.
// expect: 'throw' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  if (lane > 40) throw 1;
  rows[lane] = 0.0f;
}
