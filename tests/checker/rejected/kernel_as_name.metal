// Kernel is a keyword, which says what a function is for.
// expect: 'kernel' is a keyword of MSL
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  const int kernel = 3;
  rows[lane] = float(kernel);
}
