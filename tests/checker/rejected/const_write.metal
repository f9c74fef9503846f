// Writing through a pointer to const.
// expect: read-only variable is not assignable
#include <metal_stdlib>

using namespace metal;

[[kernel]] void store(device const float* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = 1.0f;
}
