// There are no C++ standard headers in Metal.
// expect: cmath
#include <metal_stdlib>

using namespace metal;

#include <cmath>

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = sqrt(rows[lane]);
}
