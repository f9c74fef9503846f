// Metal has no inline assembly.
// expect: 'asm' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  asm("nop");
  rows[lane] = 1.0f;
}
