// Two small kernels beside those of the project: the tests of the fake send them.
#include <metal_stdlib>

using namespace metal;

constant bool add_one [[function_constant(0)]];
constant int offset [[function_constant(1)]];

template <typename T>
[[kernel]] void scale(device const T* in [[buffer(0)]], device T* out [[buffer(1)]],
                      constant float& factor [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
  out[i] = T(factor * float(in[i])) + T(offset + (add_one ? 1 : 0));
}

template [[host_name("scale_float32")]] [[kernel]] decltype(scale<float>) scale<float>;

// An instantiation without a host_name of its own kind: a plain kernel. One of its arguments
// does not always exist.
kernel void increment(device int* values [[buffer(0)]],
                      device const int* more [[buffer(1), function_constant(add_one)]],
                      uint i [[thread_position_in_grid]]) {
  values[i] += offset;
  if (add_one) values[i] += more[i];
}
