// A program-scope variable outside the constant space.
// expect: program-scope variable.*constant
#include <metal_stdlib>

using namespace metal;

int launches = 0;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = float(launches);
}
