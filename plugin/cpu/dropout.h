// The random bits of dropout: the same for every tiling, device and implementation.
#pragma once

#include "plugin/cpu/simd.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// Threefry-2x32 with 20 rounds (Salmon et al., SC 2011). In place; T is uint32_t or U.
template <class T>
JFM_CPU_INLINE void Threefry2x32(uint32_t key0, uint32_t key1, T& x0, T& x1) {
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  constexpr int kRotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x0 += keys[0];
  x1 += keys[1];
  JFM_CPU_UNROLL for (int group = 0; group < 5; ++group) {
    JFM_CPU_UNROLL for (int r = 0; r < 4; ++r) {
      const int rotation = kRotations[(group % 2) * 4 + r];
      x0 += x1;
      x1 = (x1 << rotation) | (x1 >> (32 - rotation));
      x1 ^= x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + static_cast<uint32_t>(group + 1);
  }
}

// Bytes, 1 for a kept element, of one query and 2 * kWidth keys from `key` on, which is even. Each
// call of the generator gives the bits of two neighbouring keys.
JFM_CPU_INLINE void KeptBytes(const uint32_t (&dropout_key)[2], uint32_t threshold, int64_t query,
                              int64_t key, uint8_t* to) {
  U even = U{} + static_cast<uint32_t>(query);
  U odd = (U)Lanes() + static_cast<uint32_t>(key / 2);
  Threefry2x32(dropout_key[0], dropout_key[1], even, odd);
  const U kept = ((U)(even < threshold) & 1u) | ((U)(odd < threshold) & 0x100u);
  const U16 bytes = __builtin_convertvector(kept, U16);
  std::memcpy(to, &bytes, sizeof(bytes));
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
