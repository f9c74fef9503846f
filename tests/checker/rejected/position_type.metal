// A position attribute wants unsigned integers.
// expect: thread_position_in_grid.*(uint|unsigned)
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                           float row [[thread_position_in_grid]]) {
  rows[int(row)] *= 2.0f;
}
