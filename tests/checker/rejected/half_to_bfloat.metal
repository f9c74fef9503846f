// half and bfloat do not mix.
// expect: incompatible type|implicit conversion
#include <metal_stdlib>

using namespace metal;

[[kernel]] void convert(device const half* in [[buffer(0)]],
                        device bfloat* out [[buffer(1)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = in[lane];
}
