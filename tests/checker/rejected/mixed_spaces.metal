// A device pointer is passed where a threadgroup pointer is wanted.
// expect: no matching function
#include <metal_stdlib>

using namespace metal;

float first(threadgroup const float* row) { return row[0]; }

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = first(rows);
}
