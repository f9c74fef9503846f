// float converts to bfloat only explicitly, in an argument too.
// expect: implicit conversion.*bfloat
#include <metal_stdlib>

using namespace metal;

bfloat twice(bfloat value) { return bfloat(2.0f * float(value)); }

[[kernel]] void store(device bfloat* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = twice(3.0f);
}
