// The constant space is read-only.
// expect: read-only variable is not assignable
#include <metal_stdlib>

using namespace metal;

[[kernel]] void store(constant float* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = 1.0f;
}
