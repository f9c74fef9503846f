// Recursion through a function template with equal arguments.
// expect: recursion
#include <metal_stdlib>

using namespace metal;

template <typename T>
T halve(T n) {
  return n < T(1) ? n : halve<T>(n / T(2));
}

[[kernel]] void halves(device float* rows [[buffer(0)]],
                       uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = halve<float>(rows[lane]);
}
