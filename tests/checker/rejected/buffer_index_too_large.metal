// Buffer indices end at 30.
// expect: buffer index 31
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(31)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] *= 2.0f;
}
