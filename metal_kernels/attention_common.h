// What every attention kernel shares: function constants, operand addresses, 8x8
// fragments, tiles and their products. No kernel here.
#pragma once

#include <metal_stdlib>

#include "attention_params.h"

using namespace metal;

// Register arrays need full unrolling on a GPU; the software device, where they live
// in memory anyway, defines this away to keep its build short.
#ifndef JFM_UNROLL
#define JFM_UNROLL _Pragma("clang loop unroll(full)")
#endif

#define JFM_DECLARE_CONSTANT(type, name, index) constant type name [[function_constant(index)]];
JFM_FUNCTION_CONSTANTS(JFM_DECLARE_CONSTANT)
#undef JFM_DECLARE_CONSTANT

#define JFM_LOG2E 1.44269504088896340736f
#define JFM_LN2 0.693147180559945309417f

// Start value of a running row maximum: finite, so that a row which sees nothing gives
// exp2(-inf - JFM_MOST_NEGATIVE) = 0 instead of exp2(-inf + inf) = NaN.
#define JFM_MOST_NEGATIVE -3.402823466e+38f

// ---------------------------------------------------------------- the grid

// Position in the whole grid, of which this launch may be a part.
METAL_FUNC uint3 whole_grid(constant AttentionParams& params, uint3 position) {
  return uint3(position.x + uint(params.first_group[0]), position.y + uint(params.first_group[1]),
               position.z + uint(params.first_group[2]));
}

// ---------------------------------------------------------------- operand addresses

// First element of (batch, head). A stride of 0 shares the operand over a dimension.
METAL_FUNC long head_offset(
    constant AttentionParams& params, constant TensorStrides& strides, uint batch, int head) {
  long offset = strides.head * head;
  for (int i = params.num_batch_dims - 1; i >= 0; --i) {
    const uint size = uint(params.batch_sizes[i]);
    offset += strides.batch[i] * long(batch % size);
    batch /= size;
  }
  return offset;
}

// A position among the batch dimensions and the heads.
struct BatchHead {
  uint batch;
  int head;
};

// How many (batch, head) there are along the dimensions that an operand walks (its stride
// is not 0), or along those that it does not.
METAL_FUNC long count_pairs(
    constant AttentionParams& params, constant TensorStrides& strides, bool walked) {
  long count = (strides.head != 0) == walked ? params.num_heads : 1;
  for (int i = 0; i < params.num_batch_dims; ++i) {
    if ((strides.batch[i] != 0) == walked) count *= params.batch_sizes[i];
  }
  return count;
}

// Number `index` of them, the head running fastest; 0 along the other dimensions, so that
// a walked and a not walked one add up to any (batch, head).
METAL_FUNC BatchHead nth_pair(
    constant AttentionParams& params, constant TensorStrides& strides, bool walked, long index) {
  BatchHead pair = {0, 0};
  if ((strides.head != 0) == walked) {
    pair.head = int(index % params.num_heads);
    index /= params.num_heads;
  }
  uint stride = 1;
  for (int i = params.num_batch_dims - 1; i >= 0; --i) {
    const uint size = uint(params.batch_sizes[i]);
    if ((strides.batch[i] != 0) == walked) {
      pair.batch += uint(index % size) * stride;
      index /= size;
    }
    stride *= size;
  }
  return pair;
}

// ---------------------------------------------------------------- non-finite values
// A hidden key must not reach a row through 0 * NaN. Tiles therefore hold 0 in place of
// NaN and inf, and a row that does see such a value is made NaN through its logsumexp
// (forward) or delta (backward). Bit tests, because fast math may drop isfinite().

METAL_FUNC bool is_finite_value(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
METAL_FUNC bool is_minus_infinity(float x) { return as_type<uint>(x) == 0xff800000u; }
METAL_FUNC float finite_or_zero(float x) { return is_finite_value(x) ? x : 0.0f; }
METAL_FUNC float quiet_nan() { return as_type<float>(0x7fc00000u); }

template <typename T>
METAL_FUNC bool row_is_finite(device const T* row, int num_cols) {
  bool finite = true;
  for (int c = 0; c < num_cols; ++c) finite = finite && is_finite_value(float(row[c]));
  return finite;
}

// ---------------------------------------------------------------- fragments
// A lane of a simdgroup holds two neighbouring elements, (row, col) and (row, col + 1),
// of an 8x8 matrix. The lanes of one row differ in bits 0 and 3 of their index.

typedef simdgroup_matrix<float, 8, 8> Fragment;

METAL_FUNC int fragment_row(uint lane) { return int(((lane >> 2) & 4) | ((lane >> 1) & 3)); }
METAL_FUNC int fragment_col(uint lane) { return int(((lane >> 1) & 4) | ((lane & 1) << 1)); }

METAL_FUNC Fragment zero_fragment() { return make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }

METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Elements (row, col) and (row, col + 1) of a matrix in device memory, 0 outside.
template <typename T>
METAL_FUNC Fragment load_fragment(
    device const T* source, long row_stride, int row, int col, int num_rows, int num_cols) {
  Fragment fragment = zero_fragment();
  if (row < num_rows) {
    device const T* p = source + row * row_stride;
    if (col < num_cols) fragment.thread_elements()[0] = float(p[col]);
    if (col + 1 < num_cols) fragment.thread_elements()[1] = float(p[col + 1]);
  }
  return fragment;
}

// Elements (col, row) and (col + 1, row): the transposed fragment.
template <typename T>
METAL_FUNC Fragment load_fragment_transposed(
    device const T* source, long row_stride, int row, int col, int num_rows, int num_cols) {
  Fragment fragment = zero_fragment();
  if (row < num_cols) {
    device const T* p = source + row;
    if (col < num_rows) fragment.thread_elements()[0] = float(p[col * row_stride]);
    if (col + 1 < num_rows) fragment.thread_elements()[1] = float(p[(col + 1) * row_stride]);
  }
  return fragment;
}

// The same from a tile in threadgroup memory, which is padded: no bounds.
template <typename T>
METAL_FUNC Fragment tile_fragment(threadgroup const T* tile, int row_stride, int row, int col) {
  Fragment fragment;
  fragment.thread_elements()[0] = float(tile[row * row_stride + col]);
  fragment.thread_elements()[1] = float(tile[row * row_stride + col + 1]);
  return fragment;
}

template <typename T>
METAL_FUNC Fragment tile_fragment_transposed(
    threadgroup const T* tile, int row_stride, int row, int col) {
  Fragment fragment;
  fragment.thread_elements()[0] = float(tile[col * row_stride + row]);
  fragment.thread_elements()[1] = float(tile[(col + 1) * row_stride + row]);
  return fragment;
}

// Replaces NaN and inf by 0; returns whether there was one.
METAL_FUNC bool sanitize(thread Fragment& fragment) {
  const float x = fragment.thread_elements()[0];
  const float y = fragment.thread_elements()[1];
  fragment.thread_elements()[0] = finite_or_zero(x);
  fragment.thread_elements()[1] = finite_or_zero(y);
  return !(is_finite_value(x) && is_finite_value(y));
}

// Writes a fragment of a result, times `factor`, in the result's dtype.
template <typename T>
METAL_FUNC void store_fragment(
    Fragment fragment, float factor, device T* destination, long row_stride, int row, int col,
    int num_rows, int num_cols) {
  if (row >= num_rows) return;
  device T* p = destination + row * row_stride;
  if (col < num_cols) p[col] = T(fragment.thread_elements()[0] * factor);
  if (col + 1 < num_cols) p[col + 1] = T(fragment.thread_elements()[1] * factor);
}

// ---------------------------------------------------------------- tiles

// Elements between two rows of a tile: 16 bytes of padding spread the rows over the banks.
template <typename T, int HEAD_DIM>
METAL_FUNC constexpr int tile_row_stride() {
  return HEAD_DIM + 16 / int(sizeof(T));
}

// All threads of a threadgroup copy rows [first_row, first_row + ROWS) of a matrix into a
// tile, 0 outside num_rows x num_cols (columns up to a multiple of 8). SANITIZE puts 0 in
// place of NaN and inf, too, and lets the result say whether this thread met one.
template <typename T, int ROWS, int HEAD_DIM, int NUM_THREADS, bool SANITIZE>
METAL_FUNC bool load_tile(
    threadgroup T* tile, device const T* source, long row_stride, int first_row, int num_rows,
    int num_cols, uint thread_index) {
  const int padded_cols = (num_cols + 7) & ~7;
  bool found = false;
  for (int e = int(thread_index); e < ROWS * HEAD_DIM; e += NUM_THREADS) {
    const int row = e / HEAD_DIM;
    const int col = e % HEAD_DIM;
    if (col >= padded_cols) continue;
    T x = T(0.0f);
    if (first_row + row < num_rows && col < num_cols) {
      x = source[(first_row + row) * row_stride + col];
      if (SANITIZE && !is_finite_value(float(x))) {
        x = T(0.0f);
        found = true;
      }
    }
    tile[row * tile_row_stride<T, HEAD_DIM>() + col] = x;
  }
  return found;
}

// ---------------------------------------------------------------- products

// Rows of a matrix in device memory, as left operand: a simdgroup's 8 rows, kept in
// registers or read again from (cached) memory at every use.
template <typename T, int HEAD_DIM, bool KEEP>
struct RowFragments {
  Fragment kept[KEEP ? HEAD_DIM / 8 : 1];
  device const T* source;
  long row_stride;
  int row, col;  // of this lane
  int num_rows, num_cols;
};

template <typename T, int HEAD_DIM, bool KEEP>
METAL_FUNC Fragment row_fragment(thread const RowFragments<T, HEAD_DIM, KEEP>& rows, int d) {
  if (KEEP) return rows.kept[KEEP ? d : 0];
  return load_fragment(
      rows.source, rows.row_stride, rows.row, d * 8 + rows.col, rows.num_rows, rows.num_cols);
}

template <typename T, int HEAD_DIM, bool KEEP>
METAL_FUNC void load_rows(
    thread RowFragments<T, HEAD_DIM, KEEP>& rows, device const T* source, long row_stride,
    int first_row, int num_rows, int num_cols, uint lane) {
  rows.source = source;
  rows.row_stride = row_stride;
  rows.row = first_row + fragment_row(lane);
  rows.col = fragment_col(lane);
  rows.num_rows = num_rows;
  rows.num_cols = num_cols;
  if (KEEP) {
    JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) {
      if (d * 8 < num_cols) {
        rows.kept[KEEP ? d : 0] =
            load_fragment(source, row_stride, rows.row, d * 8 + rows.col, num_rows, num_cols);
      }
    }
  }
}

template <int N>
METAL_FUNC void clear(thread Fragment (&fragments)[N]) {
  JFM_UNROLL for (int i = 0; i < N; ++i) fragments[i] = zero_fragment();
}

// products[j] = rows · (8 rows of the tile from 8 j)ᵀ
template <typename T, int HEAD_DIM, bool KEEP, int N>
METAL_FUNC void multiply_transposed(
    thread Fragment (&products)[N], thread const RowFragments<T, HEAD_DIM, KEEP>& rows,
    threadgroup const T* tile, uint lane) {
  clear(products);
  JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) {
    if (d * 8 < rows.num_cols) {
      Fragment a = row_fragment(rows, d);
      JFM_UNROLL for (int j = 0; j < N; ++j) {
        Fragment b = tile_fragment_transposed(
            tile, tile_row_stride<T, HEAD_DIM>(), d * 8 + fragment_row(lane),
            j * 8 + fragment_col(lane));
        simdgroup_multiply_accumulate(products[j], a, b, products[j]);
      }
    }
  }
}

// sums[d] += Σ_j factors[j] · (8 rows of the tile from 8 j, 8 columns from 8 d)
template <typename T, int HEAD_DIM, int N>
METAL_FUNC void multiply_accumulate(
    thread Fragment (&sums)[HEAD_DIM / 8], thread Fragment (&factors)[N],
    threadgroup const T* tile, int num_cols, uint lane) {
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) {
      if (d * 8 < num_cols) {
        Fragment b = tile_fragment(
            tile, tile_row_stride<T, HEAD_DIM>(), j * 8 + fragment_row(lane),
            d * 8 + fragment_col(lane));
        simdgroup_multiply_accumulate(sums[d], factors[j], b, sums[d]);
      }
    }
  }
}

// Writes the 8 rows of a simdgroup, times `factor`.
template <typename T, int N>
METAL_FUNC void store_rows(
    thread Fragment (&rows)[N], float factor, device T* destination, long row_stride,
    int first_row, int num_rows, int num_cols, uint lane) {
  JFM_UNROLL for (int d = 0; d < N; ++d) {
    if (d * 8 < num_cols) {
      store_fragment(
          rows[d], factor, destination, row_stride, first_row + fragment_row(lane),
          d * 8 + fragment_col(lane), num_rows, num_cols);
    }
  }
}
