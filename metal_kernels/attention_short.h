// Short queries (q_len <= 8): the rows of all query heads of a kv head are packed into
// blocks of 8, and the keys are split over simdgroups, which is where the parallelism of
// decoding lies. Shared by the split kernels and their combine steps. No kernel here.
//
// Grid of a split kernel: x = block of NUM_SIMDGROUPS splits,
//                         y = kv head * row blocks + row block, z = batch index.
// Partial results are float32 [split, row, column] with row = ((batch · num_heads + head)
// · q_len + query): the splits of a row are summed in their order, so the result does not
// depend on who ran first.
#pragma once

#include "attention_scores.h"

struct PackedRow {
  int head;     // query head
  int query;    // query position
  bool valid;
  long index;   // row of the partial results
};

METAL_FUNC int num_row_blocks(constant AttentionParams& params) {
  return (params.q_len * params.num_groups + 7) / 8;
}

METAL_FUNC PackedRow packed_row(
    constant AttentionParams& params, int kv_head, int row_block, int fragment_row, uint batch) {
  const int r = row_block * 8 + fragment_row;
  const int first_head = kv_head * params.num_groups;
  PackedRow row;
  row.valid = r < params.q_len * params.num_groups;
  row.head = first_head + (row.valid ? r / params.q_len : 0);
  row.query = row.valid ? r % params.q_len : 0;
  row.index = (long(batch) * params.num_heads + first_head) * params.q_len + r;
  return row;
}

METAL_FUNC long num_partial_rows(constant AttentionParams& params) {
  long rows = long(params.num_heads) * params.q_len;
  for (int i = 0; i < params.num_batch_dims; ++i) rows *= params.batch_sizes[i];
  return rows;
}

// Where row `index` of the partial results lies in an operand.
METAL_FUNC long partial_row_offset(
    constant AttentionParams& params, constant TensorStrides& strides, long index) {
  const int query = int(index % params.q_len);
  const long head_index = index / params.q_len;
  const int head = int(head_index % params.num_heads);
  const uint batch = uint(head_index / params.num_heads);
  return head_offset(params, strides, batch, head) + query * strides.row;
}

// products[j] = row · (8 rows of the matrix from 8 j)ᵀ, with one packed row per
// row of fragments, which starts at `row`. What a row that is not valid gives is not used.
template <typename T, int HEAD_DIM, int N>
METAL_FUNC void multiply_row_transposed(
    thread Fragment (&products)[N], device const T* row, Matrix<T> matrix,
    uint lane) {
  const Matrix<T> own = make_matrix(row, 0, 1, matrix.num_cols, true);
  clear(products);
  JFM_NO_UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) {
    if (d * 8 >= matrix.num_cols) break;
    OperandFragment<T> a = fragment_of_row(own, row, d * 8 + fragment_col(lane));
    JFM_UNROLL for (int j = 0; j < N; ++j) {
      OperandFragment<T> b;
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        b.thread_elements()[e] = matrix_element(
            matrix, matrix_row(matrix, j * 8 + fragment_col(lane) + e),
            d * 8 + fragment_row(lane));
      }
      simdgroup_multiply_accumulate(products[j], a, b, products[j]);
    }
  }
}

// sums[d] += Σ_j factors[j] · (8 rows of the matrix from 8 j); with `sanitizes` 0 for
// NaN and inf, and the result says whether this lane met one.
template <typename T, int HEAD_DIM, int N>
METAL_FUNC bool multiply_accumulate_rows(
    thread Fragment (&sums)[HEAD_DIM / 8], thread Fragment (&factors)[N],
    Matrix<T> matrix, bool sanitizes, uint lane) {
  bool found = false;
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    device const T* row = matrix_row(matrix, j * 8 + fragment_row(lane));
    JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) {
      if (d * 8 < matrix.num_cols) {
        OperandFragment<T> b = fragment_of_row(matrix, row, d * 8 + fragment_col(lane));
        if (sanitizes) found = sanitize(b) || found;
        simdgroup_multiply_accumulate(sums[d], factors[j], b, sums[d]);
      }
    }
  }
  return found;
}

template <int N>
METAL_FUNC void store_partial_row(
    thread Fragment (&fragments)[N], float factor, device float* row, int num_cols, uint lane) {
  JFM_UNROLL for (int d = 0; d < N; ++d) {
    if (d * 8 < num_cols) {
      store_fragment(
          fragments[d], factor, row, 0, 0, d * 8 + fragment_col(lane), 1, num_cols);
    }
  }
}
