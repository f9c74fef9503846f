// A helper's pointer parameter names no address space.
// expect: pointer or reference without an address space
#include <metal_stdlib>

using namespace metal;

float first(const float* row) { return row[0]; }

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] *= 2.0f;
}
