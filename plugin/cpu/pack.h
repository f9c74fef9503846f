// From operands in memory to the blocks that the products work on: float32, or pairs of
// bfloat16, dense, padded with zeros; and back.
//
// Three forms of a block of rows [num_rows, width]:
//   rows        [num_rows, width]   left operand: pairs lie along the width
//   transposed  [width, num_rows]   right operand of a product over the width: pairs likewise
//   stacked     [num_rows, width]   right operand of a product over the rows: pairs of rows
#pragma once

#include "plugin/cpu/problem.h"
#include "plugin/cpu/product.h"

namespace jfm::cpu::JFM_ISA {
namespace {

JFM_CPU_INLINE int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
JFM_CPU_INLINE int64_t AtMost(int64_t x, int64_t limit) { return x < limit ? x : limit; }
JFM_CPU_INLINE int64_t AtLeast(int64_t x, int64_t limit) { return x > limit ? x : limit; }
JFM_CPU_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows start at multiples of this: two vectors, the pairs of which are one.
constexpr int64_t kRowAlignment = 2 * kWidth;

// Parts of one allocation, each at a multiple of 64 bytes.
struct Carver {
  char* base;
  size_t used = 0;
  template <class T>
  T* Take(int64_t count) {
    T* part = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + used);
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return part;
  }
};

// Pages of their own, so that no two threads share them.
JFM_CPU_INLINE size_t RoundUpToPages(size_t size_bytes) {
  return (size_bytes + 4095) / 4096 * 4096;
}

// What blocks consist of.
enum class Form { kFloat32, kPairs };

template <Form>
struct ProductOf {
  using Type = Float32Product;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<Form::kPairs> {
  using Type = Bfloat16Product;
};
#endif

// Beyond this a product of two rows could overflow, or is infinite or NaN already: scores of
// such blocks are looked at one by one (see scores.h). |scale| must be below 2^18 for it.
constexpr uint32_t kLargeBits = (127u + 50u) << 23;  // 2^50
constexpr uint32_t kInfiniteBits = 0x7f800000u;

// A block of an operand in memory: rows of `width` elements of T.
template <class T>
struct Source {
  const T* data;
  int64_t row_stride;
  int64_t num_rows, width;
  const T* row(int64_t i) const { return data + i * row_stride; }
};

// The types in memory. Load and Store take kWidth elements.
struct Float32 {
  float value;
  static JFM_CPU_INLINE V Load(const Float32* p) { return LoadAs<V>(p); }
  static JFM_CPU_INLINE void Store(Float32* p, V x) { std::memcpy(p, &x, sizeof(x)); }
};
struct Float16 {
  uint16_t bits;
  static JFM_CPU_INLINE V Load(const Float16* p) { return FromFloat16(LoadAs<U16>(p)); }
  static JFM_CPU_INLINE void Store(Float16* p, V x) {
    const U16 halves = ToFloat16(x);
    std::memcpy(p, &halves, sizeof(halves));
  }
};
struct Bfloat16 {
  uint16_t bits;
  static JFM_CPU_INLINE V Load(const Bfloat16* p) { return FromBfloat16(LoadAs<U16>(p)); }
  static JFM_CPU_INLINE void Store(Bfloat16* p, V x) {
    const U16 halves = ToBfloat16(x);
    std::memcpy(p, &halves, sizeof(halves));
  }
};

// kWidth elements from `col` on; zeros from `width` on.
template <class T>
JFM_CPU_INLINE V LoadPart(const T* row, int64_t col, int64_t width) {
  if (col + kWidth <= width) return T::Load(row + col);
  T part[kWidth] = {};
  if (col < width) std::memcpy(part, row + col, static_cast<size_t>(width - col) * sizeof(T));
  return T::Load(part);
}
template <class T>
JFM_CPU_INLINE void StorePart(T* row, int64_t col, int64_t width, V x) {
  if (col + kWidth <= width) return T::Store(row + col, x);
  T part[kWidth];
  T::Store(part, x);
  if (col < width) std::memcpy(row + col, part, static_cast<size_t>(width - col) * sizeof(T));
}

// A dtype's type in memory and the form of its blocks.
template <class T, Form kFormOfBlocks>
struct Layout {
  using Type = T;
  static constexpr Form kForm = kFormOfBlocks;
};

// run(Layout) of a dtype. may_pair: bfloat16 may stay pairs.
template <class Run>
JFM_CPU_INLINE auto WithLayout(Dtype dtype, [[maybe_unused]] bool may_pair, Run run) {
  switch (dtype) {
    case Dtype::kFloat32:
      return run(Layout<Float32, Form::kFloat32>());
    case Dtype::kFloat16:
      return run(Layout<Float16, Form::kFloat32>());
    case Dtype::kBfloat16:
#if defined(__AVX512BF16__)
      if (may_pair) return run(Layout<Bfloat16, Form::kPairs>());
#endif
      return run(Layout<Bfloat16, Form::kFloat32>());
  }
  __builtin_unreachable();
}

// What packing has seen of a block's numbers.
struct Seen {
  U large = {};
  JFM_CPU_INLINE void Add(V x) { large |= (U)((BitsOf(x) & 0x7fffffffu) >= kLargeBits); }
  // Two bfloat16 per lane.
  JFM_CPU_INLINE void AddPairs(V x) {
    Add(x);
    Add(FromBits(BitsOf(x) << 16));
  }
  JFM_CPU_INLINE bool any_large() const {
    uint32_t any = 0;
    for (int i = 0; i < kWidth; ++i) any |= large[i];
    return any != 0;
  }
};

// Elements of 32 bits that `count` numbers along the paired dimension take.
template <Form kForm>
JFM_CPU_INLINE int64_t NumElements(int64_t count) {
  return kForm == Form::kPairs ? (count + 1) / 2 : count;
}

// Row `i` from element `element` on, as kWidth elements of the form; zeros outside.
template <Form kForm, class T>
JFM_CPU_INLINE V LoadElements(const Source<T>& source, int64_t i, int64_t element, Seen& seen) {
  if (i >= source.num_rows) return V{};
  const T* row = source.row(i);
  if constexpr (kForm == Form::kPairs) {
    const int64_t col = 2 * element;
    V x;
    if (col + 2 * kWidth <= source.width) {
      x = LoadAs<V>(row + col);
    } else {
      T part[2 * kWidth] = {};
      if (col < source.width) {
        std::memcpy(part, row + col, static_cast<size_t>(source.width - col) * sizeof(T));
      }
      x = LoadAs<V>(part);
    }
    seen.AddPairs(x);
    return x;
  } else {
    const V x = LoadPart(row, element, source.width);
    seen.Add(x);
    return x;
  }
}

// Form "rows": `to` has RoundUp(NumElements(width), kWidth) elements per row, and num_rows rows.
// flip_sign: of all numbers.
template <Form kForm, class T>
void PackRows(const Source<T>& source, bool flip_sign, float* to, Seen& seen) {
  const int64_t width = RoundUp(NumElements<kForm>(source.width), kWidth);
  const U flip = U{} + (!flip_sign ? 0u : kForm == Form::kPairs ? 0x80008000u : 0x80000000u);
  for (int64_t i = 0; i < source.num_rows; ++i) {
    for (int64_t j = 0; j < width; j += kWidth) {
      Store(to + i * width + j, FromBits(BitsOf(LoadElements<kForm>(source, i, j, seen)) ^ flip));
    }
  }
}

// Form "transposed": NumElements(width) rows of `to_row` elements, of which RoundUp(num_rows,
// kWidth) are written.
template <Form kForm, class T>
void PackTransposed(const Source<T>& source, float* to, int64_t to_row, Seen& seen) {
  const int64_t width = NumElements<kForm>(source.width);
  // Rows outside: neighbours in memory are read one after the other.
  for (int64_t i = 0; i < source.num_rows; i += kWidth) {
    for (int64_t j = 0; j < width; j += kWidth) {
      const int64_t count = AtMost(width - j, kWidth);
      V rows[kWidth];
      JFM_CPU_UNROLL for (int k = 0; k < kWidth; ++k) {
        rows[k] = LoadElements<kForm>(source, i + k, j, seen);
      }
      Transpose(rows);
      for (int64_t k = 0; k < count; ++k) Store(to + (j + k) * to_row + i, rows[k]);
    }
  }
}

// Two rows of numbers to one of pairs: `even` in the low halves, which come first.
JFM_CPU_INLINE V StackBits(U even, U odd) { return FromBits(even | (odd << 16)); }

// Form "stacked": NumElements(num_rows) rows of RoundUp(width, kWidth) elements.
template <Form kForm, class T>
void PackStacked(const Source<T>& source, float* to, Seen& seen) {
  const int64_t width = RoundUp(source.width, kWidth);
  if constexpr (kForm == Form::kPairs) {
    const auto load = [&](int64_t i, int64_t j) {
      if (i >= source.num_rows) return U{};
      const T* row = source.row(i);
      if (j + kWidth <= source.width) return Widen(LoadAs<U16>(row + j));
      T part[kWidth] = {};
      std::memcpy(part, row + j, static_cast<size_t>(source.width - j) * sizeof(T));
      return Widen(LoadAs<U16>(part));
    };
    for (int64_t i = 0; i < source.num_rows; i += 2) {
      for (int64_t j = 0; j < width; j += kWidth) {
        const V x = StackBits(load(i, j), load(i + 1, j));
        seen.AddPairs(x);
        Store(to + i / 2 * width + j, x);
      }
    }
  } else {
    for (int64_t i = 0; i < source.num_rows; ++i) {
      for (int64_t j = 0; j < width; j += kWidth) {
        const V x = LoadPart(source.row(i), j, source.width);
        seen.Add(x);
        Store(to + i * width + j, x);
      }
    }
  }
}

// Puts 0 in place of NaN and inf in `count` elements of a packed block.
template <Form kForm>
void Sanitize(float* block, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = BitsOf(block[i]);
    if (kForm == Form::kPairs) {
      if ((bits & 0x7f80u) == 0x7f80u) bits &= 0xffff0000u;
      if ((bits & 0x7f800000u) == 0x7f800000u) bits &= 0xffffu;
    } else if ((bits & kInfiniteBits) == kInfiniteBits) {
      bits = 0;
    }
    std::memcpy(block + i, &bits, sizeof(bits));
  }
}

// Whether a row has no NaN and no inf.
template <class T>
bool RowIsFinite(const Source<T>& source, int64_t i) {
  for (int64_t j = 0; j < source.width; j += kWidth) {
    const V x = LoadPart(source.row(i), j, source.width);
    const I finite = IsFinite(x);
    for (int k = 0; k < kWidth; ++k) {
      if (!finite[k]) return false;
    }
  }
  return true;
}

// ---- probabilities and score gradients as operands: from float32 in rows of `row` elements

#if defined(__AVX512BF16__)
// 2 * kWidth numbers to kWidth pairs of neighbours.
JFM_CPU_INLINE V PairsOf(V low, V high) {
  return (V)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// In place, row by row: pairs along the columns [begin, end) of each row, begin and end multiples
// of 2 * kWidth; a row keeps its place and its stride.
JFM_CPU_INLINE void PairColumns(float* row, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += 2 * kWidth) {
    Store(row + j / 2, PairsOf(Load(row + j), Load(row + j + kWidth)));
  }
}

// Two rows, float32, to one of pairs over the rows.
JFM_CPU_INLINE V PairRows(V even, V odd) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (V)_mm512_permutexvar_epi16(interleave, both);
}
#endif

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
