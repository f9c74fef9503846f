// simdgroup matrices are 8x8.
// expect: 8x8|8 x 8|static
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 16, 16> tile;
  rows[lane] = tile.thread_elements()[0];
}
