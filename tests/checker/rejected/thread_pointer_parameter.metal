// A kernel cannot take a pointer to thread memory.
// expect: parameter 'rows'.*device or constant
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(thread float* rows [[buffer(0)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] *= 2.0f;
}
