// Kernels that test the software Metal device: one rule of Metal each.
#include <metal_stdlib>

using namespace metal;

constant bool add_one [[function_constant(0)]];
constant int offset [[function_constant(1)]];

// ---------------------------------------------------------------- positions, constants

[[kernel]] void positions(device uint* out [[buffer(0)]],
                          uint3 grid_position [[thread_position_in_grid]],
                          uint3 grid [[threads_per_grid]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  const uint at = (grid_position.z * grid.y + grid_position.y) * grid.x + grid_position.x;
  out[4 * at] = group.x + 10 * group.y + 100 * group.z;
  out[4 * at + 1] = index;
  out[4 * at + 2] = simdgroup;
  out[4 * at + 3] = lane;
}

// A parameter may have the name of a function constant.
METAL_FUNC int shifted(int value, int offset) { return value + offset; }

// The barriers make threadgroups of several dispatches alternate on the workers.
kernel void constants(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  int sum = 0;
  for (int round = 0; round < 50; ++round) {
    threadgroup_barrier(mem_flags::mem_none);
    sum += shifted(add_one ? 1 : 0, 0) + max(offset, -1000);
  }
  out[i] = sum;
}

kernel void increment(device int* values [[buffer(0)]], constant int& amount [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  values[i] = 2 * values[i] + amount;
}

kernel void reads_unbound(device int* out [[buffer(0)]], device const int* other [[buffer(7)]],
                          uint i [[thread_position_in_grid]]) {
  out[i] = other[i] * 0 + 1;
}

// ---------------------------------------------------------------- simd operations

kernel void simd_operations(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                            uint lane [[thread_index_in_simdgroup]]) {
  const int x = in[lane];
  out[lane] = simd_shuffle(x, ushort(31 - lane));
  out[32 + lane] = simd_shuffle_xor(x, ushort(5));
  out[64 + lane] = simd_shuffle_up(x, ushort(3));
  out[96 + lane] = simd_shuffle_down(x, ushort(3));
  out[128 + lane] = simd_broadcast(x, ushort(7));
  out[160 + lane] = simd_sum(x);
  out[192 + lane] = simd_max(x);
  out[224 + lane] = simd_min(x);
  out[256 + lane] = simd_and(x);
  out[288 + lane] = simd_or(x);
  out[320 + lane] = simd_xor(x);
  out[352 + lane] = simd_prefix_inclusive_sum(x);
  out[384 + lane] = simd_prefix_exclusive_sum(x);
  out[416 + lane] = simd_any(x == in[9]) ? 1 : 0;
  out[448 + lane] = simd_all(x == in[9]) ? 1 : 0;
  out[480 + lane] = int(simd_ballot(x > 0).any());
}

// Values of each lane are asked for twice in a row: neither may overwrite the other.
kernel void simd_in_turn(device int* out [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  int sum = 0;
  for (int i = 0; i < 100; ++i) {
    sum += simd_shuffle_xor(int(lane) + i, ushort(1));
    sum += simd_shuffle_xor(int(lane) * i, ushort(2));
  }
  out[lane] = sum;
}

// ---------------------------------------------------------------- matrices

// d = a · b + c with c in d's type, chained over two products.
template <typename D, typename A, typename B>
[[kernel]] void product(device const A* a [[buffer(0)]], device const B* b [[buffer(1)]],
                        device D* d [[buffer(2)]]) {
  simdgroup_matrix<A, 8, 8> x;
  simdgroup_matrix<B, 8, 8> y;
  simdgroup_matrix<D, 8, 8> sum;
  simdgroup_load(x, a);
  simdgroup_load(y, b, 8, ulong2(0), true);
  simdgroup_load(sum, d);
  simdgroup_multiply_accumulate(sum, x, y, sum);
  simdgroup_matrix<D, 8, 8> again = sum;
  simdgroup_multiply_accumulate(again, x, y, sum);
  simdgroup_store(again, d);
}
template [[host_name("product_float")]] [[kernel]] decltype(product<float, float, float>)
    product<float, float, float>;
template [[host_name("product_half")]] [[kernel]] decltype(product<half, half, half>)
    product<half, half, half>;
template [[host_name("product_mixed")]] kernel void product<float, half, bfloat>(
    device const half* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
    device float* d [[buffer(2)]]);

// Only some lanes look at a result before the next product.
kernel void product_looked_at_by_some(device float* out [[buffer(0)]],
                                      uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> one(1.0f);
  simdgroup_matrix<float, 8, 8> x(float(2.0f));
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  float seen = 0.0f;
  for (int i = 0; i < 20; ++i) {
    simdgroup_multiply_accumulate(sum, x, one, sum);
    if (lane % 3 == uint(i) % 3) seen += sum.thread_elements()[0];
    simdgroup_multiply_accumulate(x, x, one, x);
    x.thread_elements()[0] *= 0.5f;
    x.thread_elements()[1] *= 0.5f;
  }
  out[2 * lane] = seen;
  out[2 * lane + 1] = sum.thread_elements()[0];
}

// ---------------------------------------------------------------- types

kernel void half_to_float(device const half* in [[buffer(0)]], device float* out [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  out[i] = float(in[i]);
}

kernel void float_to_half(device const float* in [[buffer(0)]], device half* out [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  out[i] = half(in[i]);
}

kernel void float_to_bfloat(device const float* in [[buffer(0)]],
                            device bfloat* out [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
  out[i] = bfloat(in[i]);
}

kernel void math(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                 constant int& count [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  const float x = in[i];
  out[i] = fast::exp2(x);
  out[count + i] = precise::log2(fabs(x));
  out[2 * count + i] = tanh(x);
  out[3 * count + i] = fma(x, x, 1.0f);
  out[4 * count + i] = clamp(x, -1.0f, 1.0f);
  out[5 * count + i] = isnan(x) ? 1.0f : isinf(x) ? 2.0f : 0.0f;
  const float4 v = float4(x, float2(1.0f, 2.0f), 3.0f);
  out[6 * count + i] = dot(v.xyz, float3(1.0f)) + as_type<float>(as_type<uint>(v.w));
}

// ---------------------------------------------------------------- threadgroup memory

kernel void transpose(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                      uint i [[thread_index_in_threadgroup]],
                      uint group [[threadgroup_position_in_grid]]) {
  for (int round = 0; round < 3; ++round) {
    threadgroup float tile[16][16];
    tile[i / 16][i % 16] = in[group * 256 + i] + float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[group * 256 + i] = tile[i % 16][i / 16];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

kernel void undefined_memory(device float* out [[buffer(0)]],
                             uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  if (i == 5) tile[i] = 1.0f;
  out[i] = tile[i];
  tile[i] = 2.0f;
}

kernel void memory_full(device float* out [[buffer(0)]],
                        uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[8 * 1024];
  tile[8 * 1024 - 1 - i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[8 * 1024 - 1 - i];
}

kernel void memory_too_large(device float* out [[buffer(0)]],
                             uint i [[thread_index_in_threadgroup]]) {
  threadgroup float first[8 * 1024 - 4];
  threadgroup float second[8];
  first[i] = second[i % 8] = float(i);
  out[i] = first[i];
}

// ---------------------------------------------------------------- breaches

kernel void barrier_for_some(device int* out [[buffer(0)]],
                             uint i [[thread_index_in_threadgroup]]) {
  if (i < 40) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = 1;
}

kernel void barriers_apart(device int* out [[buffer(0)]],
                           uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = 1;
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = 2;
  }
}

kernel void simd_for_some(device int* out [[buffer(0)]],
                          uint lane [[thread_index_in_simdgroup]]) {
  int x = int(lane);
  if (lane != 3) x = simd_sum(x);
  out[lane] = x;
}

kernel void simd_different(device int* out [[buffer(0)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  int x = int(lane);
  if (lane < 16) {
    x = simd_shuffle_xor(x, ushort(1));
  } else {
    x = simd_shuffle_xor(x, ushort(2));
  }
  out[lane] = x;
}

kernel void product_for_some(device float* out [[buffer(0)]],
                             uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> x(1.0f);
  simdgroup_matrix<float, 8, 8> sum(0.0f);
  if (lane != 9) simdgroup_multiply_accumulate(sum, x, x, sum);
  out[lane] = sum.thread_elements()[0] + simd_sum(1.0f);
}

kernel void barrier_or_simd(device int* out [[buffer(0)]],
                            uint i [[thread_index_in_threadgroup]]) {
  int x = int(i);
  if (i % 2 == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    x = simd_sum(x);
  }
  out[i] = x;
}

// ---------------------------------------------------------------- for the checker

// A barrier of the whole simdgroup orders its lanes: no race.
kernel void simdgroup_exchange(device float* out [[buffer(0)]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[i ^ 1];
}

kernel void simdgroup_race(device float* out [[buffer(0)]],
                           uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  simdgroup_barrier(mem_flags::mem_device);  // the other space
  out[i] = tile[i ^ 1];
}

kernel void race_across_simdgroups(device float* out [[buffer(0)]],
                                   uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[i ^ 32];
}

kernel void race_of_threadgroups(device float* out [[buffer(0)]],
                                 uint i [[thread_index_in_threadgroup]],
                                 uint group [[threadgroup_position_in_grid]]) {
  out[i] = float(group);
}

// Read by one threadgroup, then read and written by the next.
kernel void late_write(device float* values [[buffer(0)]], device float* out [[buffer(1)]],
                       uint i [[thread_index_in_threadgroup]],
                       uint group [[threadgroup_position_in_grid]]) {
  out[32 * group + i] = values[i];
  if (group == 1) values[i] = 0.0f;
}

kernel void device_race(device float* out [[buffer(0)]],
                        uint i [[thread_index_in_threadgroup]]) {
  out[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // does not order device memory
  out[i ^ 1] += 1.0f;
}

kernel void past_the_end(device float* out [[buffer(0)]], device const float* in [[buffer(1)]],
                         uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i + 1];
}

kernel void before_the_start(device float* out [[buffer(0)]],
                             uint i [[thread_index_in_threadgroup]]) {
  (out - 1)[i] = 1.0f;
}

kernel void past_an_array(device float* out [[buffer(0)]],
                          uint i [[thread_index_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  first[i] = second[i] = 1.0f;
  out[i] = first[i + 1];
}

kernel void reads_output(device float* out [[buffer(0)]],
                         uint i [[thread_index_in_threadgroup]]) {
  out[i] = out[i] + 1.0f;
}

kernel void wild(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[long(i) + (1L << 40)] = 1.0f;
}

// Reads `source` also where it does not exist.
kernel void optional_source(device float* out [[buffer(0)]],
                            device const float* source [[buffer(1), function_constant(add_one)]],
                            uint i [[thread_index_in_threadgroup]]) {
  out[i] = source[i];
}

kernel void neighbour_bytes(device uchar* out [[buffer(0)]],
                            uint i [[thread_index_in_threadgroup]]) {
  out[i] = uchar(i);
}
