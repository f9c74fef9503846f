// In the place of MLX's: declarations alone. The software device has no atomics, and no
// kernel that is compared uses them, but functions beside those do.
#pragma once

template <typename T>
struct mlx_atomic {
  T value;
};

#define ORACLE_ATOMIC(name) \
  template <typename T>     \
  void mlx_atomic_##name##_explicit(device mlx_atomic<T>*, T, size_t);
ORACLE_ATOMIC(store)
ORACLE_ATOMIC(fetch_and)
ORACLE_ATOMIC(fetch_or)
ORACLE_ATOMIC(fetch_min)
ORACLE_ATOMIC(fetch_max)
ORACLE_ATOMIC(fetch_add)
ORACLE_ATOMIC(fetch_mul)
#undef ORACLE_ATOMIC
