// simd shuffles take at most 32 bits.
// expect: 64-bit|not supported
#include <metal_stdlib>

using namespace metal;

[[kernel]] void swap_pairs(device long* rows [[buffer(0)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = simd_shuffle_xor(rows[lane], ushort(1));
}
