// A local pointer variable names no address space.
// expect: pointer or reference without an address space
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float* row = rows + lane;
  row[0] = 1.0f;
}
