// Vertex is a keyword, which says what a function is for.
// expect: 'vertex' is a keyword of MSL
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float vertex[2] = {rows[lane], 1.0f};
  rows[lane] = vertex[0] + vertex[1];
}
