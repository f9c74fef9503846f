// Metal has no double.
// expect: 'double' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  double row = rows[lane];
  rows[lane] = float(row * 2.0f);
}
