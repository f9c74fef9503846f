// Templates that instantiate each other with other arguments do not recurse.
#include <metal_stdlib>

using namespace metal;

template <int N>
METAL_FUNC float power(float x) {
  if constexpr (N == 0) {
    return 1.0f;
  } else {
    return x * power<N - 1>(x);
  }
}

[[kernel]] void cube(device float* rows [[buffer(0)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = power<3>(rows[lane]);
}
