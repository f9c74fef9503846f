// The part of MSL's standard library that attention kernels use, in C++ for OpenCL: the
// first include of every translated kernel file. Simd operations, matrix products and
// barriers are calls of the runtime (msl_abi.h); the rest is here. Checks of what MSL
// forbids are in rewrite.py and lint.py, except where a static_assert is natural.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#include "msl_abi.h"

#define thread __private
#define threadgroup __local
#define device __global
#define constant __constant

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;

namespace metal {

// ---------------------------------------------------------------- vectors

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define MSL_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
MSL_VECTORS(bfloat)
#undef MSL_VECTORS
// Aligned like their elements.
#ifndef MSL_PACKED_ALIGNMENT
#define MSL_PACKED_ALIGNMENT(T) sizeof(T)
#endif
#define MSL_PACKED(T) __attribute__((ext_vector_type(4), aligned(MSL_PACKED_ALIGNMENT(T))))
typedef float packed_float4 MSL_PACKED(float);
typedef half packed_half4 MSL_PACKED(half);
typedef bfloat packed_bfloat4 MSL_PACKED(bfloat);
#undef MSL_PACKED
// clang has no vectors of bool here.
typedef vec<char, 2> bool2;
typedef vec<char, 3> bool3;
typedef vec<char, 4> bool4;

// Number of components and type of one.
template <typename T>
struct __msl_shape {
  static constexpr constant int size = 1;
  typedef T element;
};
template <typename T>
struct __msl_shape<T __attribute__((ext_vector_type(2)))> {
  static constexpr constant int size = 2;
  typedef T element;
};
template <typename T>
struct __msl_shape<T __attribute__((ext_vector_type(3)))> {
  static constexpr constant int size = 3;
  typedef T element;
};
template <typename T>
struct __msl_shape<T __attribute__((ext_vector_type(4)))> {
  static constexpr constant int size = 4;
  typedef T element;
};

template <typename V>
inline void __msl_put(thread V&, thread int&) {}

template <typename V, typename First, typename... Rest>
inline void __msl_put(thread V& v, thread int& i, First first, Rest... rest) {
  typedef typename __msl_shape<V>::element Element;
  if constexpr (__msl_shape<First>::size == 1) {
    v[i++] = Element(first);
  } else {
    for (int k = 0; k < __msl_shape<First>::size; ++k) v[i++] = Element(first[k]);
  }
  __msl_put(v, i, rest...);
}

// V(parts...), the constructor that rewrite.py replaces.
template <typename V, typename... Parts>
inline V __msl_make(Parts... parts) {
  constexpr int given = (0 + ... + __msl_shape<Parts>::size);
  constexpr bool is_splat = sizeof...(Parts) == 1 && given == 1;
  static_assert(is_splat || given == __msl_shape<V>::size,
                "vector constructor: wrong number of components");
  V v;
  if constexpr (is_splat) {
    ((v = V(typename __msl_shape<V>::element(parts))), ...);
  } else {
    int i = 0;
    __msl_put(v, i, parts...);
  }
  return v;
}

template <typename V>
inline V __msl_make() {
  return V(typename __msl_shape<V>::element(0));
}

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}

// ---------------------------------------------------------------- type traits, limits

template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  constexpr operator T() const thread { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <typename A, typename B>
struct is_same : false_type {};
template <typename A>
struct is_same<A, A> : true_type {};
template <typename A, typename B>
static constexpr constant bool is_same_v = is_same<A, B>::value;

template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, typename A, typename B>
struct conditional {
  typedef A type;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool condition, typename A, typename B>
using conditional_t = typename conditional<condition, A, B>::type;

template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
static constexpr constant bool is_integral_v = is_integral<T>::value;
template <typename T>
struct is_floating_point
    : bool_constant<__is_floating_point(T) || __is_same(T, half) || __is_same(T, bfloat)> {};
template <typename T>
static constexpr constant bool is_floating_point_v = is_floating_point<T>::value;

template <typename T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, lowest_value, max_value)      \
  template <>                                               \
  struct numeric_limits<T> {                                \
    static constexpr T min() { return T(lowest_value); }    \
    static constexpr T lowest() { return T(lowest_value); } \
    static constexpr T max() { return T(max_value); }       \
  };
MSL_INTEGER_LIMITS(bool, 0, 1)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(uint, 0, 4294967295u)
MSL_INTEGER_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615UL)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, min_value, max_value, epsilon_value)            \
  template <>                                                               \
  struct numeric_limits<T> {                                                \
    static constexpr T min() { return T(min_value); }                       \
    static constexpr T lowest() { return T(-max_value); }                   \
    static constexpr T max() { return T(max_value); }                       \
    static constexpr T epsilon() { return T(epsilon_value); }               \
    static constexpr T infinity() { return T(__builtin_inff()); }           \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }        \
  };
MSL_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.1920928955078125e-07f)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.3895313892515355e38f, 7.8125e-3f)
#undef MSL_FLOAT_LIMITS

// ---------------------------------------------------------------- function constants

// Reads the constant of the running pipeline. An object per declaration, because the
// name of a constant may also be that of a local variable or parameter.
template <typename T, uint index>
struct __msl_constant {
  constexpr __msl_constant() constant {}
  operator T() const constant { return T(__msl_function_constants()[index]); }
};

// ---------------------------------------------------------------- common and math

// Overloads and not templates, as in MSL: max(1, 2u) is ambiguous.
#define MSL_MIN_MAX(T)                                                         \
  inline constexpr T max(T a, T b) { return a < b ? b : a; }                   \
  inline constexpr T min(T a, T b) { return b < a ? b : a; }                   \
  inline constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
MSL_MIN_MAX(char)
MSL_MIN_MAX(uchar)
MSL_MIN_MAX(short)
MSL_MIN_MAX(ushort)
MSL_MIN_MAX(int)
MSL_MIN_MAX(uint)
MSL_MIN_MAX(long)
MSL_MIN_MAX(ulong)
#undef MSL_MIN_MAX

// A NaN operand gives the other one, as in Metal.
#define MSL_FLOAT_MIN_MAX(T)                                                                   \
  inline T fmax(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); }                   \
  inline T fmin(T a, T b) { return T(__builtin_fminf(float(a), float(b))); }                   \
  inline T max(T a, T b) { return (a < b || a != a) ? b : a; }                                 \
  inline T min(T a, T b) { return (b < a || a != a) ? b : a; }                                 \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }                        \
  inline T saturate(T x) { return clamp(x, T(0.0f), T(1.0f)); }                                \
  inline T mix(T a, T b, T t) { return a + (b - a) * t; }                                      \
  inline T sign(T x) { return x > T(0.0f) ? T(1.0f) : x < T(0.0f) ? T(-1.0f) : T(0.0f); }      \
  inline bool isnan(T x) { return __builtin_isnan(float(x)); }                                 \
  inline bool isinf(T x) { return __builtin_isinf(float(x)); }                                 \
  inline bool isfinite(T x) { return __builtin_isfinite(float(x)); }
MSL_FLOAT_MIN_MAX(float)
MSL_FLOAT_MIN_MAX(half)
MSL_FLOAT_MIN_MAX(bfloat)
#undef MSL_FLOAT_MIN_MAX

template <typename T>
inline T abs(T x) {
  return x < T(0) ? T(-x) : x;
}

template <typename T>
inline T select(T a, T b, bool take_b) {
  return take_b ? b : a;
}

inline int popcount(uint x) { return __builtin_popcount(x); }
inline int clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int ctz(uint x) { return x == 0 ? 32 : __builtin_ctz(x); }

#ifdef JFM_CHECKER
#define MSL_COUNTED(name) __msl_##name
#else
#define MSL_COUNTED(name) __builtin_##name##f
#endif
#define MSL_UNARY(T, name, function) \
  inline T name(T x) { return T(function(float(x))); }
#define MSL_MATH(T)                                                                       \
  MSL_UNARY(T, exp, MSL_COUNTED(exp))                                                     \
  MSL_UNARY(T, exp2, MSL_COUNTED(exp2))                                                   \
  MSL_UNARY(T, log, MSL_COUNTED(log))                                                     \
  MSL_UNARY(T, log2, MSL_COUNTED(log2))                                                   \
  MSL_UNARY(T, sqrt, __builtin_sqrtf)                                                     \
  MSL_UNARY(T, floor, __builtin_floorf)                                                   \
  MSL_UNARY(T, ceil, __builtin_ceilf)                                                     \
  MSL_UNARY(T, trunc, __builtin_truncf)                                                   \
  MSL_UNARY(T, round, __builtin_roundf)                                                   \
  MSL_UNARY(T, rint, __builtin_rintf)                                                     \
  MSL_UNARY(T, sin, __builtin_sinf)                                                       \
  MSL_UNARY(T, cos, __builtin_cosf)                                                       \
  MSL_UNARY(T, tanh, MSL_COUNTED(tanh))                                                   \
  MSL_UNARY(T, fabs, __builtin_fabsf)                                                     \
  inline T rsqrt(T x) { return T(1.0f / __builtin_sqrtf(float(x))); }                     \
  inline T pow(T x, T y) { return T(__builtin_powf(float(x), float(y))); }                \
  inline T fmod(T x, T y) { return T(__builtin_fmodf(float(x), float(y))); }              \
  inline T divide(T x, T y) { return x / y; }                                             \
  inline T fma(T a, T b, T c) { return T(__builtin_fmaf(float(a), float(b), float(c))); }
MSL_MATH(float)
MSL_MATH(half)
MSL_MATH(bfloat)
// Both are the same here: the fast variants differ only in the GPU's instructions.
namespace fast {
MSL_MATH(float)
using metal::clamp;
using metal::fmax;
using metal::fmin;
using metal::max;
using metal::min;
}  // namespace fast
namespace precise {
MSL_MATH(float)
using metal::clamp;
using metal::fmax;
using metal::fmin;
using metal::max;
using metal::min;
}  // namespace precise
#undef MSL_MATH
#undef MSL_UNARY
#undef MSL_COUNTED

template <typename V>
inline typename __msl_shape<V>::element dot(V a, V b) {
  typename __msl_shape<V>::element sum = 0;
  for (int i = 0; i < __msl_shape<V>::size; ++i) sum += a[i] * b[i];
  return sum;
}

// ---------------------------------------------------------------- barriers

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

#define MSL_INLINE inline __attribute__((always_inline))

#ifdef JFM_CHECKER  // tells it where in the kernel's source a barrier is
#define MSL_CALLER , const constant char* file = __builtin_FILE(), int line = __builtin_LINE()
#define MSL_NOTE_CALLER __msl_note_barrier_place(file, line)
#else
#define MSL_CALLER
#define MSL_NOTE_CALLER
#endif
MSL_INLINE void threadgroup_barrier(mem_flags flags MSL_CALLER) {
  MSL_NOTE_CALLER;
  __msl_threadgroup_barrier(uint(flags));
}
MSL_INLINE void simdgroup_barrier(mem_flags flags MSL_CALLER) {
  MSL_NOTE_CALLER;
  __msl_simdgroup_barrier(uint(flags));
}
#undef MSL_CALLER
#undef MSL_NOTE_CALLER

// ---------------------------------------------------------------- simd operations

// The values of all lanes of the simdgroup.
template <typename T>
MSL_INLINE const thread T* __msl_all_lanes(T value, MslOperation operation) {
  static_assert(sizeof(typename __msl_shape<T>::element) <= 4,
                "simd operation: 64-bit types are not supported by MSL");
  return (const thread T*)__msl_exchange(&value, sizeof(T), operation);
}

template <typename T>
MSL_INLINE T simd_shuffle(T value, ushort lane) {
  return __msl_all_lanes(value, kMslShuffle)[lane % MSL_SIMD_WIDTH];
}
template <typename T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask) {
  return __msl_all_lanes(value, kMslShuffleXor)[(__msl_lane_index() ^ mask) % MSL_SIMD_WIDTH];
}
template <typename T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta) {
  const thread T* values = __msl_all_lanes(value, kMslShuffleDown);
  const uint lane = __msl_lane_index() + delta;
  return lane < MSL_SIMD_WIDTH ? values[lane] : value;
}
template <typename T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta) {
  const thread T* values = __msl_all_lanes(value, kMslShuffleUp);
  const uint lane = __msl_lane_index();
  return lane >= delta ? values[lane - delta] : value;
}
template <typename T>
MSL_INLINE T simd_shuffle_rotate_down(T value, ushort delta) {
  return __msl_all_lanes(value, kMslShuffleRotate)[(__msl_lane_index() + delta) % MSL_SIMD_WIDTH];
}
template <typename T>
MSL_INLINE T simd_shuffle_rotate_up(T value, ushort delta) {
  return __msl_all_lanes(value, kMslShuffleRotate)[(__msl_lane_index() - delta) % MSL_SIMD_WIDTH];
}
template <typename T>
MSL_INLINE T simd_broadcast(T value, ushort lane) {
  return __msl_all_lanes(value, kMslBroadcast)[lane % MSL_SIMD_WIDTH];
}
template <typename T>
MSL_INLINE T simd_broadcast_first(T value) {
  return __msl_all_lanes(value, kMslBroadcast)[0];
}
inline bool simd_is_first() { return __msl_lane_index() == 0; }

// As a tree, lanes 16 apart first: the order of a GPU's butterfly.
template <typename T>
inline T simd_sum(T value) {
  const thread T* values = __msl_all_lanes(value, kMslSum);
  T sums[MSL_SIMD_WIDTH / 2];
  for (int i = 0; i < 16; ++i) sums[i] = values[i] + values[i + 16];
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] = sums[i] + sums[i + width];
  }
  return sums[0];
}

#define MSL_REDUCTION(name, operation, expression)             \
  template <typename T>                                        \
  inline T name(T value) {                                     \
    const thread T* values = __msl_all_lanes(value, operation); \
    T result = values[0];                                      \
    for (int i = 1; i < MSL_SIMD_WIDTH; ++i) {                 \
      const T next = values[i];                                \
      result = expression;                                     \
    }                                                          \
    return result;                                             \
  }
MSL_REDUCTION(simd_product, kMslProduct, result * next)
MSL_REDUCTION(simd_max, kMslMax, max(result, next))
MSL_REDUCTION(simd_min, kMslMin, min(result, next))
MSL_REDUCTION(simd_and, kMslAnd, result & next)
MSL_REDUCTION(simd_or, kMslOr, result | next)
MSL_REDUCTION(simd_xor, kMslXor, result ^ next)
#undef MSL_REDUCTION

template <typename T>
inline T simd_prefix_inclusive_sum(T value) {
  const thread T* values = __msl_all_lanes(value, kMslPrefixSum);
  T sum = values[0];
  for (uint i = 1; i <= __msl_lane_index(); ++i) sum = sum + values[i];
  return sum;
}
template <typename T>
inline T simd_prefix_exclusive_sum(T value) {
  const thread T* values = __msl_all_lanes(value, kMslPrefixSum);
  T sum = T(0);
  for (uint i = 0; i < __msl_lane_index(); ++i) sum = sum + values[i];
  return sum;
}

MSL_INLINE ulong __msl_vote(bool value, MslOperation operation) {
  const thread bool* values = __msl_all_lanes(value, operation);
  ulong vote = 0;
  for (int i = 0; i < MSL_SIMD_WIDTH; ++i) vote |= ulong(values[i]) << i;
  return vote;
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits_;
  explicit constexpr simd_vote(vote_t bits) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  constexpr bool all() const { return bits_ == 0xffffffffUL; }
  constexpr bool any() const { return bits_ != 0; }
};
inline simd_vote simd_ballot(bool value) { return simd_vote(__msl_vote(value, kMslBallot)); }
inline bool simd_any(bool value) { return __msl_vote(value, kMslAny) != 0; }
inline bool simd_all(bool value) { return __msl_vote(value, kMslAll) == 0xffffffffUL; }

// ---------------------------------------------------------------- simdgroup_matrix

// Lane l holds elements (row, col) and (row, col + 1). Products are added late, many at a
// time: whoever looks at the elements of a matrix makes the simdgroup run those it waits for.
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
  // Temporaries have no address space, hence the parameters without one.
  MSL_INLINE simdgroup_matrix(const simdgroup_matrix& other) : elements_(other.settled()) {}
  MSL_INLINE simdgroup_matrix& operator=(const simdgroup_matrix& other) {
    const vec<T, 2> elements = other.settled();
    settle();
    elements_ = elements;
    return *this;
  }
  MSL_INLINE ~simdgroup_matrix() { settle(); }

  MSL_INLINE thread vec<T, 2>& thread_elements() thread {
    settle();
    return elements_;
  }
  MSL_INLINE const thread vec<T, 2>& thread_elements() const thread {
    settle();
    return elements_;
  }

  MSL_INLINE static int row() {
    const int lane = int(__msl_lane_index());
    return ((lane >> 2) & 4) | ((lane >> 1) & 3);
  }
  MSL_INLINE static int col() {
    const int lane = int(__msl_lane_index());
    return ((lane >> 1) & 4) | ((lane & 1) << 1);
  }

  MSL_INLINE void settle() const {
    while (pending_ != 0) __msl_run_products();
  }
  MSL_INLINE vec<T, 2> settled() const {
    settle();
    return elements_;
  }

  // The layout of MslAccumulator if T is float; only then is pending_ ever not 0.
  vec<T, 2> elements_;
  uint pending_ = 0;
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

template <typename To, typename From>
MSL_INLINE void __msl_convert_matrix(thread simdgroup_matrix<To, 8, 8>& to,
                                     const thread simdgroup_matrix<From, 8, 8>& from) {
  const vec<From, 2> elements = from.thread_elements();
  to.thread_elements()[0] = To(elements[0]);
  to.thread_elements()[1] = To(elements[1]);
}

// d = a * b + c, summed in float.
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              thread simdgroup_matrix<A, 8, 8>& a,
                                              thread simdgroup_matrix<B, 8, 8>& b,
                                              thread simdgroup_matrix<C, 8, 8>& c) {
  const vec<A, 2> x = a.thread_elements();
  const vec<B, 2> y = b.thread_elements();
  if constexpr (is_same_v<D, float>) {
    if ((const thread void*)&d != (const thread void*)&c) __msl_convert_matrix(d, c);
    ++d.pending_;
    __msl_enqueue_product((thread MslAccumulator*)&d, float(x[0]), float(x[1]), float(y[0]),
                          float(y[1]));
  } else {
    simdgroup_matrix<float, 8, 8> sum;
    __msl_convert_matrix(sum, c);
    ++sum.pending_;
    __msl_enqueue_product((thread MslAccumulator*)&sum, float(x[0]), float(x[1]), float(y[0]),
                          float(y[1]));
    __msl_convert_matrix(d, sum);
  }
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
  inline void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const space T* source,        \
                             ulong elements_per_row = 8, ulong2 origin = ulong2(0),             \
                             bool transpose = false) {                                          \
    source += origin.y * elements_per_row + origin.x;                                           \
    const int row = d.row();                                                                    \
    const int col = d.col();                                                                    \
    for (int e = 0; e < 2; ++e) {                                                               \
      d.thread_elements()[e] = transpose ? source[(col + e) * elements_per_row + row]           \
                                         : source[row * elements_per_row + col + e];            \
    }                                                                                           \
  }                                                                                             \
  template <typename T>                                                                         \
  inline void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& a, space T* destination,  \
                              ulong elements_per_row = 8, ulong2 origin = ulong2(0),            \
                              bool transpose = false) {                                         \
    destination += origin.y * elements_per_row + origin.x;                                      \
    const int row = a.row();                                                                    \
    const int col = a.col();                                                                    \
    for (int e = 0; e < 2; ++e) {                                                               \
      destination[transpose ? (col + e) * elements_per_row + row                                \
                            : row * elements_per_row + col + e] = a.thread_elements()[e];       \
    }                                                                                           \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY
#undef MSL_INLINE

// ---------------------------------------------------------------- what rewrite.py uses

constexpr constant ulong __msl_nothing[32] = {};

// A bound buffer, as whatever the kernel's parameter is.
struct __msl_buffer {
  ulong address;
  bool exists;
  template <typename T>
  operator device T*() const {
    return (device T*)address;
  }
  template <typename T>
  operator constant T*() const {
    return (constant T*)address;
  }
  template <typename T>
  operator device T&() const {
    return *(device T*)referenced(sizeof(T));
  }
  template <typename T>
  operator constant T&() const {
    return *(constant T*)referenced(sizeof(T));
  }
  // clang reads a reference ahead of the condition that it exists under.
  ulong referenced(ulong size) const {
    return exists || size > sizeof(__msl_nothing) ? address : ulong(__msl_nothing);
  }
};

// A position or size, as whatever integer or vector the kernel's parameter is.
struct __msl_position {
  uint x, y, z;
  operator uint() const { return x; }
  operator ushort() const { return ushort(x); }
  operator uint2() const { return __msl_make<uint2>(x, y); }
  operator ushort2() const { return __msl_make<ushort2>(x, y); }
  operator uint3() const { return __msl_make<uint3>(x, y, z); }
  operator ushort3() const { return __msl_make<ushort3>(x, y, z); }
};

struct __msl_thread : MslThread {
  // Not 0 for one that does not exist: clang takes a pointer that is read for another.
  __msl_buffer buffer(int index, bool exists = true) const thread {
    return {exists ? group->buffers[index] : MSL_NO_BUFFER, exists};
  }
  uint lane_index() const thread { return lane; }
  uint threads_per_simdgroup() const thread { return MSL_SIMD_WIDTH; }
  uint simdgroup_index() const thread { return simdgroup; }
  uint simdgroups() const thread {
    const uint threads = group->threads.x * group->threads.y * group->threads.z;
    return (threads + MSL_SIMD_WIDTH - 1) / MSL_SIMD_WIDTH;
  }
  uint thread_index() const thread { return index; }
  __msl_position thread_in_threadgroup() const thread { return of(position); }
  __msl_position threadgroup_in_grid() const thread { return of(group->position); }
  __msl_position threadgroups() const thread { return of(group->grid); }
  __msl_position threads_per_threadgroup() const thread { return of(group->threads); }
  __msl_position thread_in_grid() const thread {
    return {group->position.x * group->threads.x + position.x,
            group->position.y * group->threads.y + position.y,
            group->position.z * group->threads.z + position.z};
  }
  __msl_position threads_per_grid() const thread {
    return {group->grid.x * group->threads.x, group->grid.y * group->threads.y,
            group->grid.z * group->threads.z};
  }
  static __msl_position of(MslSize size) { return {size.x, size.y, size.z}; }
};

}  // namespace metal

using metal::as_type;
using metal::bfloat2;
using metal::bfloat3;
using metal::bfloat4;
using metal::bool2;
using metal::bool3;
using metal::bool4;
using metal::char2;
using metal::char3;
using metal::char4;
using metal::float2;
using metal::float3;
using metal::float4;
using metal::half2;
using metal::half3;
using metal::half4;
using metal::int2;
using metal::int3;
using metal::int4;
using metal::long2;
using metal::long3;
using metal::long4;
using metal::packed_bfloat4;
using metal::packed_float4;
using metal::packed_half4;
using metal::short2;
using metal::short3;
using metal::short4;
using metal::uchar2;
using metal::uchar3;
using metal::uchar4;
using metal::uint2;
using metal::uint3;
using metal::uint4;
using metal::ulong2;
using metal::ulong3;
using metal::ulong4;
using metal::ushort2;
using metal::ushort3;
using metal::ushort4;
