// What MLX's headers use of Metal's standard library and our kernels do not: the part that
// msl_shim.h leaves out. Read after it, by clang alone, not by rewrite.py.
#pragma once

namespace metal {

template <typename From, typename To>
static constexpr constant bool is_convertible_v = __is_convertible(From, To);

template <typename T>
struct remove_cv {
  typedef T type;
};
template <typename T>
struct remove_cv<const T> {
  typedef T type;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;

template <typename T>
struct remove_addrspace {
  typedef T type;
};
template <typename T>
struct remove_addrspace<constant T> {
  typedef T type;
};
template <typename T>
struct remove_addrspace<thread T> {
  typedef T type;
};
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

// To clang another type than char.
template <>
struct numeric_limits<int8_t> {
  static constexpr int8_t min() { return -128; }
  static constexpr int8_t lowest() { return -128; }
  static constexpr int8_t max() { return 127; }
};

inline float atan2(float y, float x) { return __builtin_atan2f(y, x); }

template <typename T>
inline T simd_shuffle_and_fill_up(T value, T fill, ushort delta) {
  const T shuffled = simd_shuffle_up(value, delta);
  return __msl_lane_index() >= delta ? shuffled : fill;
}

template <typename T, int Size>
inline simdgroup_matrix<T, Size, Size> make_filled_simdgroup_matrix(T value) {
  return make_filled_simdgroup_matrix<T, Size, Size>(value);
}

}  // namespace metal

// In the place of a compiler builtin, which rewrite.py takes for a mistake.
template <typename T>
static constexpr constant bool oracle_is_empty = __is_empty(T);

// clang has the builtin operator for pointers without an address space only.
template <typename T, typename V, V v, template <typename U, U> class Constant>
inline device T* thread& operator+=(device T* thread& pointer, Constant<V, v>) {
  return pointer += long(v);
}
