// Kernel arguments that exist only where a function constant is true; int reductions,
// long clamps, vectors of uint and a cast of a pointer to another element type.
#include <metal_stdlib>

using namespace metal;

constant bool has_bias [[function_constant(0)]];
constant bool is_half [[function_constant(1)]];

#define ARGUMENTS                                                   \
  device const uchar* bias [[buffer(1), function_constant(has_bias)]], \
      device const int* ids [[function_constant(has_bias), buffer(2)]]

METAL_FUNC uint2 rotate(uint2 x) { return uint2(x.y, (x.x << 3) | (x.x >> 29)); }

template <typename T>
[[kernel]] void add(device T* rows [[buffer(0)]], ARGUMENTS,
                    uint lane [[thread_index_in_simdgroup]]) {
  float x = precise::tanh(float(rows[lane]));
  if (has_bias) {
    x += is_half ? float(((device const half*)bias)[lane])
                 : float(((device const bfloat*)bias)[lane]);
    const int id = ids[lane];
    if (simd_max(id) < simd_min(-id) && simd_all(id > 0)) x = 0.0f;
  }
  const int position = int(clamp(long(lane) - 7, 0L, long(rotate(uint2(1, 2))[1])));
  rows[position] = T(x);
}

template [[host_name("add_float")]] [[kernel]] decltype(add<float>) add<float>;
