// What an optional argument depends on is declared.
// expect: 'has_source' is not a function constant of type bool
#include <metal_stdlib>

using namespace metal;

[[kernel]] void copy(device float* rows [[buffer(0)]],
                     device const float* source [[buffer(1), function_constant(has_source)]]) {
  rows[0] = source[0];
}
