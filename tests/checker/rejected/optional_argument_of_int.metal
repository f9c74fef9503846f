// What an optional argument depends on is true or false.
// expect: 'width' is not a function constant of type bool
#include <metal_stdlib>

using namespace metal;

constant int width [[function_constant(0)]];

[[kernel]] void copy(device float* rows [[buffer(0)]],
                     device const float* source [[buffer(1), function_constant(width)]]) {
  rows[0] = source[0];
}
