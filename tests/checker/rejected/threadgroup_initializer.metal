// A threadgroup variable starts undefined; an initializer would lie.
// expect: threadgroup variable.*initializer
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[32] = {0.0f};
  rows[lane] = tile[lane];
}
