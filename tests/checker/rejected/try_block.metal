// Metal has no exceptions.
// expect: 'try' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  try {
    rows[lane] = 0.0f;
  } catch (...) {
  }
}
