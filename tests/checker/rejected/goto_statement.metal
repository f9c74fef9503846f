// Metal has no goto.
// expect: 'goto' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  if (lane > 3) goto done;
  rows[lane] = 1.0f;
done:
  return;
}
