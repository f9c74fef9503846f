// Our compiler's builtins and OpenCL spellings are not Metal.
// expect: '__builtin_sqrtf' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = __builtin_sqrtf(rows[lane]);
}
