// Metal has no heap.
// expect: 'delete' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  thread float* row = nullptr;
  delete row;
  rows[lane] = 0.0f;
}
