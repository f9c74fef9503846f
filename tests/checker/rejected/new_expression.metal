// Metal has no heap.
// expect: 'new' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  thread float* row = new float[3];
  rows[lane] = row[0];
}
