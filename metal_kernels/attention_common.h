// What every attention kernel shares: function constants, operand addresses, the
// visibility rule, 8x8 fragments and the cooperative tile load. No kernel here.
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

// ---------------------------------------------------------------- visibility

METAL_FUNC bool is_visible(constant AttentionParams& params, int query_index, int key_index) {
  const bool in_range = aligned_kv || key_index < params.kv_len;
  return in_range && (!is_causal || key_index <= query_index + params.q_offset);
}

// One past the last key that any query up to `last_query` sees.
METAL_FUNC int end_of_visible_keys(constant AttentionParams& params, int last_query) {
  return is_causal ? min(params.kv_len, last_query + params.q_offset + 1) : params.kv_len;
}

// ---------------------------------------------------------------- non-finite values
// A hidden key must not reach a row through 0 * NaN. Tiles therefore hold 0 in place of
// NaN and inf, and a row that does see such a value is made NaN through its logsumexp
// (forward) or delta (backward). Bit tests, because fast math may drop isfinite().

METAL_FUNC bool is_finite_value(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
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
