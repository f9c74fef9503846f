// msl_shim.h for a GPU with 32 lanes (NVPTX): the first include of a translated kernel file.
// What does not depend on how lanes meet is msl_shim.h's own: included with the names of
// simd operations, matrices and barriers changed, and these defined again below. Two uses:
//   default             runs on an NVIDIA GPU; the exponential and the logarithm are that GPU's
//   JFM_GPU_ESTIMATE    never runs: a product, exp2, a shuffle, a vote, a reduction and a barrier
//                       are one line "jfm.…" of the PTX each (plugin/nvptx/resources.py)
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// ---------------------------------------------------------------- what msl_shim.h asks for

#ifdef JFM_GPU_ESTIMATE
#define JFM_GPU_FUNCTION(function, name)                     \
  inline float function(float x) {                           \
    float y;                                                 \
    __asm__("jfm." name " %0, %1;" : "=f"(y) : "f"(x));      \
    return y;                                                \
  }
JFM_GPU_FUNCTION(__msl_gpu_exp2, "exp2")
JFM_GPU_FUNCTION(__msl_gpu_log2, "log2")
JFM_GPU_FUNCTION(__msl_gpu_tanh, "tanh")
#undef JFM_GPU_FUNCTION
// One access for a GPU whose loads ask only that an element is aligned, as Apple's are said to.
#define MSL_PACKED_ALIGNMENT(T) (4 * sizeof(T))
#else
inline float __msl_gpu_exp2(float x) { return __nvvm_ex2_approx_f(x); }
inline float __msl_gpu_log2(float x) { return __nvvm_lg2_approx_f(x); }
inline float __msl_gpu_tanh(float x) {
  const float square = x * x;
  // A quotient of exponentials has no digits left near 0.
  const float series =
      x + x * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
  const float quotient = 1.0f - 2.0f / (__nvvm_ex2_approx_f(x * 2.88539008177792681472f) + 1.0f);
  return square < 0.04f ? series : quotient;
}
#endif
inline float __msl_gpu_exp(float x) { return __msl_gpu_exp2(x * 1.44269504088896340736f); }
inline float __msl_gpu_log(float x) { return __msl_gpu_log2(x) * 0.693147180559945309417f; }

#define __builtin_exp2f __msl_gpu_exp2
#define __builtin_expf __msl_gpu_exp
#define __builtin_log2f __msl_gpu_log2
#define __builtin_logf __msl_gpu_log
#define __builtin_tanhf __msl_gpu_tanh

#define __msl_lane_index __msl_software_lane_index
#define __msl_constant __msl_software_constant
#define threadgroup_barrier __msl_software_threadgroup_barrier
#define simdgroup_barrier __msl_software_simdgroup_barrier
#define simd_shuffle __msl_software_shuffle
#define simd_shuffle_xor __msl_software_shuffle_xor
#define simd_shuffle_down __msl_software_shuffle_down
#define simd_shuffle_up __msl_software_shuffle_up
#define simd_shuffle_rotate_down __msl_software_shuffle_rotate_down
#define simd_shuffle_rotate_up __msl_software_shuffle_rotate_up
#define simd_broadcast __msl_software_broadcast
#define simd_broadcast_first __msl_software_broadcast_first
#define simd_is_first __msl_software_is_first
#define simd_sum __msl_software_sum
#define simd_product __msl_software_product
#define simd_max __msl_software_max
#define simd_min __msl_software_min
#define simd_and __msl_software_and
#define simd_or __msl_software_or
#define simd_xor __msl_software_xor
#define simd_prefix_inclusive_sum __msl_software_prefix_inclusive_sum
#define simd_prefix_exclusive_sum __msl_software_prefix_exclusive_sum
#define simd_vote __msl_software_simd_vote
#define simd_ballot __msl_software_ballot
#define simd_any __msl_software_any
#define simd_all __msl_software_all
#define simdgroup_matrix __msl_software_matrix
#define simdgroup_half8x8 __msl_software_half8x8
#define simdgroup_bfloat8x8 __msl_software_bfloat8x8
#define simdgroup_float8x8 __msl_software_float8x8
#define make_filled_simdgroup_matrix __msl_software_filled_matrix
#define simdgroup_multiply_accumulate __msl_software_multiply_accumulate
#define simdgroup_multiply __msl_software_multiply
#define simdgroup_load __msl_software_load
#define simdgroup_store __msl_software_store

#include "msl_shim.h"

#undef __msl_lane_index
#undef __msl_constant
#undef threadgroup_barrier
#undef simdgroup_barrier
#undef simd_shuffle
#undef simd_shuffle_xor
#undef simd_shuffle_down
#undef simd_shuffle_up
#undef simd_shuffle_rotate_down
#undef simd_shuffle_rotate_up
#undef simd_broadcast
#undef simd_broadcast_first
#undef simd_is_first
#undef simd_sum
#undef simd_product
#undef simd_max
#undef simd_min
#undef simd_and
#undef simd_or
#undef simd_xor
#undef simd_prefix_inclusive_sum
#undef simd_prefix_exclusive_sum
#undef simd_vote
#undef simd_ballot
#undef simd_any
#undef simd_all
#undef simdgroup_matrix
#undef simdgroup_half8x8
#undef simdgroup_bfloat8x8
#undef simdgroup_float8x8
#undef make_filled_simdgroup_matrix
#undef simdgroup_multiply_accumulate
#undef simdgroup_multiply
#undef simdgroup_load
#undef simdgroup_store

#define MSL_INLINE inline __attribute__((always_inline))

// ---------------------------------------------------------------- function constants

#define JFM_NUM_FUNCTION_CONSTANTS 32

#ifdef JFM_FUNCTION_CONSTANT_VALUES
// Known while compiling: what a pipeline of one set of values would be.
static constant const int jfm_function_constants[JFM_NUM_FUNCTION_CONSTANTS] = {
    JFM_FUNCTION_CONSTANT_VALUES};
#else
// Weak: its value is not known before whoever loads the kernel writes it.
__attribute__((weak)) extern constant const int
    jfm_function_constants[JFM_NUM_FUNCTION_CONSTANTS] = {};
#endif

namespace metal {

template <typename T, uint index>
struct __msl_constant {
  static_assert(index < JFM_NUM_FUNCTION_CONSTANTS, "more function constants than places");
  constexpr __msl_constant() constant {}
  operator T() const constant { return T(jfm_function_constants[index]); }
};

// ---------------------------------------------------------------- lanes and barriers

MSL_INLINE uint __msl_lane_index() { return __nvvm_read_ptx_sreg_laneid(); }
#define JFM_ALL_LANES 0xffffffffu

#ifdef JFM_GPU_ESTIMATE
MSL_INLINE int __msl_shuffle_word(int value, uint lane) {
  int result;
  __asm__ volatile("jfm.shuffle %0, %1, %2;" : "=r"(result) : "r"(value), "r"(lane));
  return result;
}
MSL_INLINE uint __msl_ballot(bool value) {
  uint result;
  __asm__ volatile("jfm.vote %0, %1;" : "=r"(result) : "r"(int(value)));
  return result;
}
MSL_INLINE void threadgroup_barrier(mem_flags) {
  __asm__ volatile("jfm.threadgroup_barrier;" ::: "memory");
}
MSL_INLINE void simdgroup_barrier(mem_flags) {
  __asm__ volatile("jfm.simdgroup_barrier;" ::: "memory");
}
#else
MSL_INLINE int __msl_shuffle_word(int value, uint lane) {
  return __nvvm_shfl_sync_idx_i32(JFM_ALL_LANES, value, lane, 0x1f);
}
MSL_INLINE uint __msl_ballot(bool value) {
  return __nvvm_vote_ballot_sync(JFM_ALL_LANES, value);
}
// A barrier that does not order threadgroup memory orders nothing here: whoever needed it to
// would be found by racecheck.
MSL_INLINE void threadgroup_barrier(mem_flags flags) {
  if (flags != mem_flags::mem_none) __nvvm_bar_sync(0);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags) {
  if (flags != mem_flags::mem_none) __nvvm_bar_warp_sync(JFM_ALL_LANES);
}
#endif

// The value that a lane has, whatever its type of at most 32 bits, or vector of them.
template <typename T>
MSL_INLINE T __msl_lane_value(T value, uint lane) {
  static_assert(sizeof(typename __msl_shape<T>::element) <= 4,
                "simd operation: 64-bit types are not supported by MSL");
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, __msl_shuffle_word(__builtin_bit_cast(int, value), lane));
  } else if constexpr (sizeof(T) == 2) {
    const int word = __msl_shuffle_word(int(__builtin_bit_cast(ushort, value)), lane);
    return __builtin_bit_cast(T, ushort(word));
  } else if constexpr (sizeof(T) == 1) {
    return T(__msl_shuffle_word(int(value), lane));
  } else {
    T result;
    for (int i = 0; i < __msl_shape<T>::size; ++i) result[i] = __msl_lane_value(value[i], lane);
    return result;
  }
}

template <typename T>
MSL_INLINE T simd_shuffle(T value, ushort lane) {
  return __msl_lane_value(value, lane % MSL_SIMD_WIDTH);
}
template <typename T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask) {
  return __msl_lane_value(value, (__msl_lane_index() ^ mask) % MSL_SIMD_WIDTH);
}
template <typename T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta) {
  const uint lane = __msl_lane_index() + delta;
  const T other = __msl_lane_value(value, lane % MSL_SIMD_WIDTH);
  return lane < MSL_SIMD_WIDTH ? other : value;
}
template <typename T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta) {
  const uint lane = __msl_lane_index();
  const T other = __msl_lane_value(value, (lane - delta) % MSL_SIMD_WIDTH);
  return lane >= delta ? other : value;
}
template <typename T>
MSL_INLINE T simd_shuffle_rotate_down(T value, ushort delta) {
  return __msl_lane_value(value, (__msl_lane_index() + delta) % MSL_SIMD_WIDTH);
}
template <typename T>
MSL_INLINE T simd_shuffle_rotate_up(T value, ushort delta) {
  return __msl_lane_value(value, (__msl_lane_index() - delta) % MSL_SIMD_WIDTH);
}
template <typename T>
MSL_INLINE T simd_broadcast(T value, ushort lane) {
  return __msl_lane_value(value, lane % MSL_SIMD_WIDTH);
}
template <typename T>
MSL_INLINE T simd_broadcast_first(T value) {
  return __msl_lane_value(value, 0);
}
MSL_INLINE bool simd_is_first() { return __msl_lane_index() == 0; }

// Lanes 16 apart first. The estimate takes a reduction for one operation, as it is in MSL.
#ifdef JFM_GPU_ESTIMATE
#define MSL_REDUCTION(name, operation, expression)                                             \
  template <typename T>                                                                        \
  MSL_INLINE T name(T value) {                                                                 \
    static_assert(sizeof(T) == 4, "of 32 bits");                                               \
    int word = __builtin_bit_cast(int, value);                                                 \
    __asm__ volatile("jfm.reduction %0, %1;" : "=r"(word) : "r"(word));                        \
    return __builtin_bit_cast(T, word);                                                        \
  }
#else
#define MSL_REDUCTION(name, operation, expression)                                              \
  template <typename T>                                                                         \
  MSL_INLINE T name(T value) {                                                                  \
    T result = value;                                                                           \
    for (uint distance = 16; distance > 0; distance /= 2) {                                     \
      const T next = __msl_lane_value(result, __msl_lane_index() ^ distance);                   \
      result = expression;                                                                      \
    }                                                                                           \
    return result;                                                                              \
  }
#endif
MSL_REDUCTION(simd_sum, kMslSum, result + next)
MSL_REDUCTION(simd_product, kMslProduct, result* next)
MSL_REDUCTION(simd_max, kMslMax, max(result, next))
MSL_REDUCTION(simd_min, kMslMin, min(result, next))
MSL_REDUCTION(simd_and, kMslAnd, result& next)
MSL_REDUCTION(simd_or, kMslOr, result | next)
MSL_REDUCTION(simd_xor, kMslXor, result ^ next)
#undef MSL_REDUCTION

template <typename T>
MSL_INLINE T simd_prefix_inclusive_sum(T value) {
  for (uint distance = 1; distance < MSL_SIMD_WIDTH; distance *= 2) {
    const uint lane = __msl_lane_index();
    const T other = __msl_lane_value(value, (lane - distance) % MSL_SIMD_WIDTH);
    if (lane >= distance) value = value + other;
  }
  return value;
}
template <typename T>
MSL_INLINE T simd_prefix_exclusive_sum(T value) {
  const T sum = simd_shuffle_up(simd_prefix_inclusive_sum(value), 1);
  return simd_is_first() ? T(0) : sum;
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits_;
  explicit constexpr simd_vote(vote_t bits) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  constexpr bool all() const { return bits_ == 0xffffffffUL; }
  constexpr bool any() const { return bits_ != 0; }
};
MSL_INLINE simd_vote simd_ballot(bool value) { return simd_vote(__msl_ballot(value)); }
MSL_INLINE bool simd_any(bool value) { return __msl_ballot(value) != 0; }
MSL_INLINE bool simd_all(bool value) { return __msl_ballot(!value) == 0; }

// ---------------------------------------------------------------- simdgroup_matrix

// Lane l holds elements (row, col) and (row, col + 1), as msl_shim.h has it.
template <typename T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix: only 8x8 exists");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix: half, bfloat or float");

  MSL_INLINE simdgroup_matrix() {}
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    const int distance = row() - col();
    elements_[0] = distance == 0 ? diagonal : T(0.0f);
    elements_[1] = distance == 1 ? diagonal : T(0.0f);
  }
  MSL_INLINE thread vec<T, 2>& thread_elements() thread { return elements_; }
  MSL_INLINE const thread vec<T, 2>& thread_elements() const thread { return elements_; }

  MSL_INLINE static int row() {
    const int lane = int(__msl_lane_index());
    return ((lane >> 2) & 4) | ((lane >> 1) & 3);
  }
  MSL_INLINE static int col() {
    const int lane = int(__msl_lane_index());
    return ((lane >> 1) & 4) | ((lane & 1) << 1);
  }

  vec<T, 2> elements_;
};

typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int Cols, int Rows>
MSL_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> matrix;
  matrix.elements_ = vec<T, 2>(value);
  return matrix;
}

// The lane that holds (row, col), if col is even.
MSL_INLINE uint __msl_lane_of(uint row, uint col) {
  return ((row & 4) << 2) | ((col & 4) << 1) | ((row & 3) << 1) | ((col >> 1) & 1);
}

#ifdef JFM_GPU_ESTIMATE
// Operands of 16 bits are packed in pairs: a GPU with registers of 16 bits has two in 32.
// volatile: else a product may sink to where its result is used, far behind its operands.
template <typename A, typename B>
MSL_INLINE vec<float, 2> __msl_product(vec<A, 2> a, vec<B, 2> b, vec<float, 2> c) {
  float x, y;
#define JFM_PRODUCT(left, right) \
  __asm__ volatile("jfm.product {%0, %1}, " left ", " right ", {%2, %3};" \
                   : "=f"(x), "=f"(y) : "f"(c[0]), "f"(c[1]),
  if constexpr (is_same_v<A, float> && is_same_v<B, float>) {
    JFM_PRODUCT("{%4, %5}", "{%6, %7}") "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]));
  } else if constexpr (is_same_v<A, float>) {
    JFM_PRODUCT("{%4, %5}", "{%6}")
        "f"(a[0]), "f"(a[1]), "r"(__builtin_bit_cast(int, b)));
  } else if constexpr (is_same_v<B, float>) {
    JFM_PRODUCT("{%4}", "{%5, %6}")
        "r"(__builtin_bit_cast(int, a)), "f"(b[0]), "f"(b[1]));
  } else {
    JFM_PRODUCT("{%4}", "{%5}")
        "r"(__builtin_bit_cast(int, a)), "r"(__builtin_bit_cast(int, b)));
  }
#undef JFM_PRODUCT
  vec<float, 2> result;
  result[0] = x;
  result[1] = y;
  return result;
}
#else
// Both elements of a lane: one shuffle for 16-bit types, two for float.
template <typename T>
MSL_INLINE vec<float, 2> __msl_lane_pair(vec<T, 2> value, uint lane) {
  const vec<T, 2> pair = __msl_lane_value(value, lane);
  vec<float, 2> result;
  result[0] = float(pair[0]);
  result[1] = float(pair[1]);
  return result;
}

// c + a b, the eight terms of an element in their order.
template <typename A, typename B>
MSL_INLINE vec<float, 2> __msl_product(vec<A, 2> a, vec<B, 2> b, vec<float, 2> c) {
  const uint lane = __msl_lane_index();
  const uint row = ((lane >> 2) & 4) | ((lane >> 1) & 3);
  const uint col = ((lane >> 1) & 4) | ((lane & 1) << 1);
  for (uint k = 0; k < 8; k += 2) {
    const vec<float, 2> left = __msl_lane_pair(a, __msl_lane_of(row, k));
    const vec<float, 2> upper = __msl_lane_pair(b, __msl_lane_of(k, col));
    const vec<float, 2> lower = __msl_lane_pair(b, __msl_lane_of(k + 1, col));
    for (int e = 0; e < 2; ++e) {
      c[e] = __builtin_fmaf(left[0], upper[e], c[e]);
      c[e] = __builtin_fmaf(left[1], lower[e], c[e]);
    }
  }
  return c;
}
#endif

// d = a b + c, summed in float.
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              thread simdgroup_matrix<A, 8, 8>& a,
                                              thread simdgroup_matrix<B, 8, 8>& b,
                                              thread simdgroup_matrix<C, 8, 8>& c) {
  vec<float, 2> sum;
  sum[0] = float(c.elements_[0]);
  sum[1] = float(c.elements_[1]);
  sum = __msl_product(a.elements_, b.elements_, sum);
  d.elements_[0] = D(sum[0]);
  d.elements_[1] = D(sum[1]);
}

template <typename D, typename A, typename B>
MSL_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                   thread simdgroup_matrix<A, 8, 8>& a,
                                   thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f));
  simdgroup_multiply_accumulate(d, a, b, zero);
}

#define MSL_MATRIX_MEMORY(space)                                                                \
  template <typename T>                                                                         \
  MSL_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const space T* source,    \
                                 ulong elements_per_row = 8, ulong2 origin = ulong2(0),         \
                                 bool transpose = false) {                                      \
    source += origin.y * elements_per_row + origin.x;                                           \
    const int row = d.row();                                                                    \
    const int col = d.col();                                                                    \
    for (int e = 0; e < 2; ++e) {                                                               \
      d.elements_[e] = transpose ? source[(col + e) * elements_per_row + row]                   \
                                 : source[row * elements_per_row + col + e];                    \
    }                                                                                           \
  }                                                                                             \
  template <typename T>                                                                         \
  MSL_INLINE void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& a,                    \
                                  space T* destination, ulong elements_per_row = 8,             \
                                  ulong2 origin = ulong2(0), bool transpose = false) {          \
    destination += origin.y * elements_per_row + origin.x;                                      \
    const int row = a.row();                                                                    \
    const int col = a.col();                                                                    \
    for (int e = 0; e < 2; ++e) {                                                               \
      destination[transpose ? (col + e) * elements_per_row + row                                \
                            : row * elements_per_row + col + e] = a.elements_[e];               \
    }                                                                                           \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY

// ---------------------------------------------------------------- entry points

// The addresses of a launch's buffers: the one argument of an entry point.
struct __msl_arguments {
  ulong buffers[MSL_MAX_BUFFERS];
};

MSL_INLINE MslGroup __msl_running_group(const __msl_arguments arguments) {
  MslGroup group;
  group.position = {uint(__nvvm_read_ptx_sreg_ctaid_x()), uint(__nvvm_read_ptx_sreg_ctaid_y()),
                    uint(__nvvm_read_ptx_sreg_ctaid_z())};
  group.grid = {uint(__nvvm_read_ptx_sreg_nctaid_x()), uint(__nvvm_read_ptx_sreg_nctaid_y()),
                uint(__nvvm_read_ptx_sreg_nctaid_z())};
  group.threads = {uint(__nvvm_read_ptx_sreg_ntid_x()), uint(__nvvm_read_ptx_sreg_ntid_y()),
                   uint(__nvvm_read_ptx_sreg_ntid_z())};
  for (int i = 0; i < MSL_MAX_BUFFERS; ++i) group.buffers[i] = arguments.buffers[i];
  return group;
}

MSL_INLINE __msl_thread __msl_running_thread(const thread MslGroup* group) {
  __msl_thread running;
  running.group = group;
  running.position = {uint(__nvvm_read_ptx_sreg_tid_x()), uint(__nvvm_read_ptx_sreg_tid_y()),
                      uint(__nvvm_read_ptx_sreg_tid_z())};
  running.index = running.position.x +
                  group->threads.x * (running.position.y + group->threads.y * running.position.z);
  running.simdgroup = running.index / MSL_SIMD_WIDTH;
  running.lane = running.index % MSL_SIMD_WIDTH;
  return running;
}

}  // namespace metal

#undef MSL_INLINE

// The entry point of a kernel, around the function that rewrite.py made for it.
#define JFM_GPU_ENTRY(host_name, function)                                             \
  extern "C" __kernel __attribute__((flatten)) void host_name(                         \
      metal::__msl_arguments arguments) {                                              \
    const MslGroup group = metal::__msl_running_group(arguments);                      \
    const metal::__msl_thread running = metal::__msl_running_thread(&group);           \
    function(&running);                                                                \
  }
