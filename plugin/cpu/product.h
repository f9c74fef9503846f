// Products of small matrices that lie in the caches. One kernel for all of attention's: the
// left operand is read element by element at any strides, the right one and the result by rows.
//
// An element is 32 bits: a float, or a pair of bfloat16 that are neighbours along the summed
// dimension (AVX512-BF16). All rows of right operands and results are padded to kWidth elements.
#pragma once

#include "plugin/cpu/simd.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// Accumulators of one step: kTileRows * kTileVectors registers; what is left of them holds the
// right operand. 16 registers with AVX2 and plain x86, 32 elsewhere.
constexpr int kTileRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kTileCols = kTileVectors * kWidth;

// c + a·b of float32.
struct Float32Product {
  static constexpr int kPerElement = 1;
  static JFM_CPU_INLINE V MultiplyAdd(V a, V b, V c) { return Fma(a, b, c); }
};
#if defined(__AVX512BF16__)
// c + a₀·b₀ + a₁·b₁ of pairs of bfloat16, in float32.
struct Bfloat16Product {
  static constexpr int kPerElement = 2;
  static JFM_CPU_INLINE V MultiplyAdd(V a, V b, V c) {
    return (V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// A matrix whose element (i, j) is data[i * row + j * col].
struct Matrix {
  float* data;
  int64_t row, col;
};

// What is not zero in a product, or is not wanted of it: a half-open range per row of the left
// operand. Null begin: everything.
struct Band {
  const int32_t* begin = nullptr;
  const int32_t* end = nullptr;
};

struct Span {
  int64_t begin, end;
};

// The range from the smallest begin to the largest end of some rows that are not empty.
JFM_CPU_INLINE Span HullOf(const Band& band, int64_t first, int64_t count, int64_t size) {
  if (band.begin == nullptr) return {0, size};
  Span hull = {size, 0};
  for (int64_t i = first; i < first + count; ++i) {
    if (band.begin[i] >= band.end[i]) continue;
    if (band.begin[i] < hull.begin) hull.begin = band.begin[i];
    if (band.end[i] > hull.end) hull.end = band.end[i];
  }
  return hull;
}

template <class Product, int kRows, int kVectors, bool kAccumulate>
__attribute__((noinline)) void MultiplyTile(float* c, int64_t c_row, const float* a, int64_t a_row,
                                            int64_t a_col, const float* b, int64_t b_row,
                                            int64_t depth) {
  V sums[kRows][kVectors];
  JFM_CPU_UNROLL for (int i = 0; i < kRows; ++i) {
    JFM_CPU_UNROLL for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = kAccumulate ? Load(c + i * c_row + j * kWidth) : V{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    JFM_CPU_UNROLL for (int j = 0; j < kVectors; ++j) right[j] = Load(b + k * b_row + j * kWidth);
    JFM_CPU_UNROLL for (int i = 0; i < kRows; ++i) {
      const V left = Broadcast(a[i * a_row + k * a_col]);
      JFM_CPU_UNROLL for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = Product::MultiplyAdd(left, right[j], sums[i][j]);
      }
    }
  }
  JFM_CPU_UNROLL for (int i = 0; i < kRows; ++i) {
    JFM_CPU_UNROLL for (int j = 0; j < kVectors; ++j) Store(c + i * c_row + j * kWidth, sums[i][j]);
  }
}

using TileFunction = void (*)(float*, int64_t, const float*, int64_t, int64_t, const float*,
                              int64_t, int64_t);

// By the numbers of rows and vectors, from 1.
template <class Product, bool kAccumulate>
JFM_CPU_INLINE TileFunction TileOf(int64_t num_rows, int64_t num_vectors) {
#define JFM_TILES(rows)                                                                       \
  {                                                                                           \
    MultiplyTile<Product, rows, 1, kAccumulate>, MultiplyTile<Product, rows, 2, kAccumulate>, \
        MultiplyTile<Product, rows, kTileVectors == 4 ? 3 : 2, kAccumulate>,                  \
        MultiplyTile<Product, rows, kTileVectors, kAccumulate>                                \
  }
  static constexpr TileFunction kTiles[kTileRows][4] = {JFM_TILES(1), JFM_TILES(2), JFM_TILES(3),
                                                        JFM_TILES(4), JFM_TILES(5), JFM_TILES(6)};
#undef JFM_TILES
  return kTiles[num_rows - 1][num_vectors - 1];
}

// What a band says: which columns of the result are wanted, or which part of the summed
// dimension is not zero.
enum class Banded { kColumns, kDepth };

// c = a·b, or c += a·b: c [rows, cols], a [rows, depth], b [depth, cols]; cols is a multiple of
// kWidth, depth counts numbers, not pairs. a.col is 1 for pairs along a's rows. With
// Banded::kColumns, columns outside may be computed too, or not; what is, is in whole vectors.
template <class Product, bool kAccumulate, Banded kBanded>
void Multiply(float* c, int64_t c_row, Matrix a, const float* b, int64_t b_row, int64_t rows,
              int64_t cols, int64_t depth, Band band) {
  constexpr int kPer = Product::kPerElement;
  // The right operand's columns outside: their rows stay in the first cache.
  for (int64_t col = 0; col < cols; col += kTileCols) {
    const int64_t width = cols - col < kTileCols ? cols - col : kTileCols;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t height = rows - row < kTileRows ? rows - row : kTileRows;
      const Span hull = HullOf(band, row, height, kBanded == Banded::kColumns ? cols : depth);
      int64_t first = 0, last = (depth + kPer - 1) / kPer;
      if (hull.end <= hull.begin) continue;
      int64_t begin = col, end = col + width;
      if (kBanded == Banded::kColumns) {
        if (hull.begin >= end || hull.end <= begin) continue;
        if (begin < hull.begin) begin = hull.begin / kWidth * kWidth;
        if (end > hull.end) end = (hull.end + kWidth - 1) / kWidth * kWidth;
      } else {
        first = hull.begin / kPer;
        last = (hull.end + kPer - 1) / kPer;
      }
      TileOf<Product, kAccumulate>(height, (end - begin) / kWidth)(
          c + row * c_row + begin, c_row, a.data + row * a.row + first * a.col, a.row, a.col,
          b + first * b_row + begin, b_row, last - first);
    }
  }
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
