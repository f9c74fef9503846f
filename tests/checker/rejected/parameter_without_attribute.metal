// A kernel parameter needs an attribute.
// expect: parameter 'length' .*attribute
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]], uint length,
                           uint lane [[thread_index_in_simdgroup]]) {
  if (lane < length) rows[lane] *= 2.0f;
}
