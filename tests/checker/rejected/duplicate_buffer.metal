// Two parameters share a buffer index.
// expect: buffer index 0 .*twice
#include <metal_stdlib>

using namespace metal;

[[kernel]] void copy(device const float* in [[buffer(0)]],
                     device float* out [[buffer(0)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = in[lane];
}
