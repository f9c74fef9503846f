// What AIR modules call, on the runtime of the software device (msl_abi.h). Written again
// rather than taken from msl_shim.h, so that a mistake in one of the two is seen; where MSL
// leaves an order or a rounding open (sums over lanes, fast::exp), it is that of the shim.
//
// air.py knows the names that stand at the beginning of a line here, as AIR("name", ...).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "plugin/device/software/frontend/msl_abi.h"

#define AIR(name, function, type, ...)             \
  extern "C" type function(__VA_ARGS__) asm(name); \
  extern "C" type function(__VA_ARGS__)

namespace {

// The values of all lanes.
template <typename T>
const T* Exchange(T value, MslOperation operation) {
  return static_cast<const T*>(__msl_exchange(&value, sizeof(value), operation));
}

// A butterfly: partners 16 lanes apart, then 8, 4, 2, 1.
template <typename T>
T Sum(T value) {
  T values[32];
  std::memcpy(values, Exchange(value, kMslSum), sizeof(values));
  for (int distance = 16; distance >= 1; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) values[lane] += values[lane + distance];
  }
  return values[0];
}

// A NaN gives way to the other operand.
template <typename T>
T Larger(T a, T b) {
  return std::isnan(static_cast<float>(a)) || a < b ? b : a;
}

template <typename T>
T Max(T value) {
  const T* values = Exchange(value, kMslMax);
  T result = values[0];
  for (int lane = 1; lane < 32; ++lane) result = Larger(result, values[lane]);
  return result;
}

unsigned Component(MslSize size, unsigned component) {
  return component == 0 ? size.x : component == 1 ? size.y : size.z;
}

}  // namespace

// ---------------------------------------------------------------- attributes of parameters
// `component` of the vector; 0 if it is none.

AIR("air.thread_index_in_simdgroup", Lane, unsigned, const MslThread* t, unsigned) {
  return t->lane;
}
AIR("air.simdgroup_index_in_threadgroup", Simdgroup, unsigned, const MslThread* t, unsigned) {
  return t->simdgroup;
}
AIR("air.thread_position_in_threadgroup", InGroup, unsigned, const MslThread* t, unsigned c) {
  return Component(t->position, c);
}
AIR("air.threadgroup_position_in_grid", Group, unsigned, const MslThread* t, unsigned c) {
  return Component(t->group->position, c);
}
AIR("air.threadgroups_per_grid", Groups, unsigned, const MslThread* t, unsigned c) {
  return Component(t->group->grid, c);
}
AIR("air.threads_per_threadgroup", Threads, unsigned, const MslThread* t, unsigned c) {
  return Component(t->group->threads, c);
}
AIR("air.thread_position_in_grid", InGrid, unsigned, const MslThread* t, unsigned c) {
  return Component(t->group->position, c) * Component(t->group->threads, c) +
         Component(t->position, c);
}
AIR("air.simdgroups_per_threadgroup", Simdgroups, unsigned, const MslThread* t, unsigned) {
  const MslSize threads = t->group->threads;
  return (threads.x * threads.y * threads.z + 31) / 32;
}
// A buffer's address, or what stands for one that the pipeline does not have.
AIR("air.buffer", Buffer, void*, const MslThread* t, unsigned index, bool exists) {
  return reinterpret_cast<void*>(exists ? t->group->buffers[index] : MSL_NO_BUFFER);
}

// ---------------------------------------------------------------- functions

// The callers do not extend arguments of type i1, i8 and i16.
AIR("air.normalize_function_constant_predicate.i8", IsTrue, uint8_t, uint8_t value) {
  return value & 1;
}
AIR("air.max.s.i32", MaxInt, int32_t, int32_t a, int32_t b) { return a < b ? b : a; }
AIR("air.min.s.i32", MinInt, int32_t, int32_t a, int32_t b) { return b < a ? b : a; }
AIR("air.fmax.f32", FMax, float, float a, float b) { return Larger(a, b); }
AIR("air.fast_exp.f32", FastExp, float, float x) { return std::exp(x); }
AIR("air.fast_exp2.f32", FastExp2, float, float x) { return std::exp2(x); }
AIR("air.fast_log.f32", FastLog, float, float x) { return std::log(x); }
AIR("air.log.f32", Log, float, float x) { return std::log(x); }
AIR("air.log2.f32", Log2, float, float x) { return std::log2(x); }

AIR("air.wg.barrier", GroupBarrier, void, int32_t flags, int32_t) {
  __msl_threadgroup_barrier(flags);
}
AIR("air.simdgroup.barrier", SimdBarrier, void, int32_t flags, int32_t) {
  __msl_simdgroup_barrier(flags);
}
AIR("air.simd_shuffle_xor.f32", ShuffleXor, float, float value, uint16_t mask) {
  const float* values = Exchange(value, kMslShuffleXor);
  return values[(__msl_lane_index() ^ mask) & 31];
}
AIR("air.simd_sum.f32", SumFloat, float, float value) { return Sum(value); }
AIR("air.simd_sum.f16", SumHalf, _Float16, _Float16 value) { return Sum(value); }
AIR("air.simd_max.f32", MaxFloat, float, float value) { return Max(value); }
AIR("air.simd_max.f16", MaxHalf, _Float16, _Float16 value) { return Max(value); }
AIR("air.simd_min.s.i32", MinLanes, int32_t, int32_t value) {
  const int32_t* values = Exchange(value, kMslMin);
  return *std::min_element(values, values + 32);
}
AIR("air.simd_all", All, bool, uint8_t value) {
  const bool* values = Exchange((value & 1) != 0, kMslAll);
  return std::count(values, values + 32, true) == 32;
}
AIR("air.simd_any", Any, bool, uint8_t value) {
  const bool* values = Exchange((value & 1) != 0, kMslAny);
  return std::count(values, values + 32, true) > 0;
}
AIR("air.simd_prefix_inclusive_sum.f32", PrefixSum, float, float value) {
  const float* values = Exchange(value, kMslPrefixSum);
  float sum = values[0];
  for (unsigned lane = 1; lane <= __msl_lane_index(); ++lane) sum += values[lane];
  return sum;
}

// ---------------------------------------------------------------- simdgroup matrices
// air.py takes the two elements of this lane out of AIR's vectors of 64.

extern "C" void air_matrix_product(float a0, float a1, float b0, float b1, float c0, float c1,
                                   float* d) {
  MslAccumulator sum = {{c0, c1}, 1};
  __msl_enqueue_product(&sum, a0, a1, b0, b1);
  while (sum.pending != 0) __msl_run_products();
  d[0] = sum.elements[0];
  d[1] = sum.elements[1];
}

// Where in memory element 0 or 1 of this lane is. The 8x8 matrix is four 4x4 quarters, of
// eight lanes each, with two neighbours of a row in a lane (as MLX's headers compute it).
extern "C" int64_t air_matrix_offset(int element, int64_t per_row, int64_t column, int64_t row,
                                     bool transposed) {
  const int lane = static_cast<int>(__msl_lane_index());
  const int quarter = lane / 8;
  int64_t i = quarter / 2 * 4 + lane % 8 / 2;
  int64_t j = quarter % 2 * 4 + lane % 2 * 2 + element;
  if (transposed) {
    const int64_t swapped = i;
    i = j;
    j = swapped;
  }
  return (row + i) * per_row + column + j;
}
