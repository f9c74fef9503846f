// A cast drops the address space.
// expect: without an address space
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = *(const float*)(rows + lane);
}
