// A static local outside the constant space.
// expect: static
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  static int calls = 0;
  rows[lane] = float(calls);
}
