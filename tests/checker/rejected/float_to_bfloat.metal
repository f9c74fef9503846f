// float converts to bfloat only explicitly.
// expect: implicit conversion.*bfloat
#include <metal_stdlib>

using namespace metal;

[[kernel]] void store(device bfloat* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  float row = float(lane);
  rows[lane] = row;
}
