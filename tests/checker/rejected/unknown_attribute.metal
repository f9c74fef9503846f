// A misspelt built-in attribute.
// expect: attribute.*thread_index_in_warp
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                           uint lane [[thread_index_in_warp]]) {
  rows[lane] *= 2.0f;
}
