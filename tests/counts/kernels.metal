// Kernels whose every count is known, and kernels with barriers that order something or
// nothing. test_exact_counts.py and test_redundant_barriers.py say what must be found.
#include <metal_stdlib>

using namespace metal;

constant bool is_odd_path [[function_constant(0)]];

// ---------------------------------------------------------------- counts

// By every lane: exp 1, exp2 3, log 1, log2 2, tanh 1; by odd ones one exp2 more.
kernel void functions(device const float* in [[buffer(0)]], device float* out [[buffer(3)]],
                      uint i [[thread_position_in_grid]]) {
  const float x = in[i];
  float sum = exp(x) + exp2(x + 1.0f) + fast::exp2(x + 2.0f) + float(exp2(half(x)));
  sum += log(x + 3.0f) + log2(x + 4.0f) + precise::log2(x + 5.0f) + tanh(x);
  if (i % 2 == 1) sum += exp2(x + 6.0f);
  out[i] = sum + sqrt(x);
}

// Shuffles: 4 in every simdgroup. Votes: 2 in the first. Reductions: 3 in the others.
kernel void simd_functions(device int* out [[buffer(0)]],
                           uint i [[thread_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int x = int(i);
  int sum = simd_shuffle(x, ushort(3)) + simd_shuffle_xor(x, ushort(1)) +
            simd_shuffle_down(x, ushort(2)) + simd_broadcast_first(x);
  if (simdgroup == 0) {
    sum += (simd_any(x > 5) ? 1 : 0) + (simd_ballot(x > 7).all() ? 1 : 0);
  } else {
    sum += simd_sum(x) + simd_max(x) + simd_prefix_inclusive_sum(x);
  }
  out[i] = sum;
}

struct Factors {
  float first, second;
  int rounds;
};

// Bytes by a lane: buffer(1) 16 read; buffer(2) 2 read by every fourth; buffer(4) 4 written,
// 8 with the function constant; constant 8; threadgroup 4 written and 8 read.
kernel void memory(constant Factors& factors [[buffer(0)]],
                   device const float4* wide [[buffer(1)]],
                   device const half* narrow [[buffer(2)]],
                   device float* out [[buffer(4)]],
                   uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  const float4 x = wide[i];
  float y = x.x * factors.first + x.y * x.z + x.w * factors.second;
  if (i % 4 == 0) y += float(narrow[i / 4]);
  tile[i] = y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[i ^ 33] + tile[i ^ 1];
  if (is_odd_path) out[i + 64] = y;
}

// Bytes read of buffer(0) by a simdgroup: 4 that all lanes read, 8 times 4 that 4 lanes each
// read, 4 in each round, 2 times 4 that two lanes read with an access each. By a lane: 4 of
// threadgroup memory. in[0] must be 0.
kernel void shared_reads(device const int* in [[buffer(0)]],
                         constant Factors& factors [[buffer(1)]],
                         device int* out [[buffer(2)]],
                         uint i [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup int tile[1];
  if (i == 0) tile[0] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int zero = in[0];
  int sum = tile[0] + in[8 + lane / 4];
  for (int round = 0; round < factors.rounds; ++round) sum += in[16 + zero * round];
  if (lane == 1) sum += in[20];
  if (lane == 2) sum += 2 * in[20 + zero];
  out[i] = sum;
}

// Products: 2 a round in every simdgroup, 1 more in the second.
kernel void products(constant Factors& factors [[buffer(0)]], device float* out [[buffer(1)]],
                     uint i [[thread_index_in_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_matrix<half, 8, 8> a(half(1.0f));
  simdgroup_matrix<float, 8, 8> b(2.0f);
  for (int round = 0; round < factors.rounds; ++round) {
    simdgroup_multiply_accumulate(sum, a, b, sum);
    simdgroup_multiply_accumulate(sum, b, b, sum);
  }
  if (simdgroup == 1) simdgroup_multiply_accumulate(sum, a, a, sum);
  out[i] = sum.thread_elements()[0];
}

// Barriers of a threadgroup: 5. Of a simdgroup: 2 in the first one.
kernel void barriers(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  for (int round = 0; round < 5; ++round) threadgroup_barrier(mem_flags::mem_none);
  if (simdgroup == 0) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_barrier(mem_flags::mem_device);
  }
  out[i] = 1.0f;
}

// ---------------------------------------------------------------- barriers
// Each line with a barrier that must be kept ends in `needed`, each other in `redundant`.

kernel void last_barrier(device float* out [[buffer(0)]],
                         uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  out[i] = tile[i ^ 32];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // redundant
}

// Either of the two can go.
kernel void twice(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  threadgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  out[i] = tile[i ^ 32];
}

// A tile that is filled in a loop: before and after.
kernel void tiles(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  float sum = 0.0f;
  for (int round = 0; round < 3; ++round) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
    tile[i] = float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
    sum += tile[63 - i];
    threadgroup_barrier(mem_flags::mem_device);  // redundant
  }
  out[i] = sum;
}

// Two tiles in turn: one barrier a round is enough, here there are two.
kernel void tiles_in_turn(device float* out [[buffer(0)]],
                          uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[2][64];
  float sum = 0.0f;
  for (int round = 0; round < 4; ++round) {
    tile[round % 2][i] = float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
    sum += tile[round % 2][63 - i];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  }
  out[i] = sum;
}

// Passed twice between the accesses, which are in every other round only.
kernel void every_other_round(device float* out [[buffer(0)]],
                              uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  for (int round = 0; round < 4; ++round) {
    if (round == 1) tile[i] = float(i);
    if (round == 3) out[i] = tile[63 - i];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  }
}

// Only the second threadgroup reads what others wrote.
kernel void in_one_threadgroup(device float* out [[buffer(0)]],
                               uint i [[thread_index_in_threadgroup]],
                               uint group [[threadgroup_position_in_grid]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  out[group * 64 + i] = group == 1 ? tile[63 - i] : tile[i];
}

kernel void simdgroups(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);  // needed
  const float x = tile[i ^ 1];
  simdgroup_barrier(mem_flags::mem_threadgroup);  // needed
  tile[i] = x + 1.0f;
  simdgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  threadgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  out[i] = tile[i ^ 2];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  tile[63 - i] = 0.0f;
}

// Threads of a simdgroup need less than those of several.
kernel void of_both_kinds(device float* out [[buffer(0)]],
                          uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);  // redundant
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  out[i] = tile[i ^ 1] + tile[i ^ 32];
}

kernel void device_memory(device float* out [[buffer(0)]],
                          uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[i] = 1.0f;
  out[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_device);  // needed
  const float x = out[63 - i];
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);  // needed
  out[i] = x + tile[i];
}

METAL_FUNC void exchange(threadgroup float* tile, uint i, float x) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
  tile[i] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // needed
}

// A function's barrier counts for each kernel, and for all of its calls together.
kernel void functions_barriers(device float* out [[buffer(0)]],
                               uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  exchange(tile, i, 1.0f);
  const float x = tile[63 - i];
  exchange(tile, i, 2.0f);
  out[i] = x + tile[63 - i];
}
