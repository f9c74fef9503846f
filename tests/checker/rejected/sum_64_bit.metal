// simd reductions take at most 32 bits.
// expect: 64-bit|not supported
#include <metal_stdlib>

using namespace metal;

[[kernel]] void total(device ulong* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = simd_sum(rows[lane]);
}
