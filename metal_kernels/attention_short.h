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

// The packed rows of a simdgroup: `row` is this lane's. What one that is not valid gives is not
// used.
template <int HEAD_DIM, typename T>
METAL_FUNC RowFragments<T, HEAD_DIM, 1, false> packed_rows(device const T* row, int num_cols) {
  RowFragments<T, HEAD_DIM, 1, false> rows;
  rows.matrix = make_matrix(row, 0, 1, num_cols, true);
  return rows;
}

// The keys of a block, read from device memory: no other simdgroup of the threadgroup reads them.
template <int HEAD_DIM, int BLOCK_KV, typename T>
METAL_FUNC Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> device_tile(Matrix<T> matrix) {
  Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> tile;
  tile.matrix = matrix;
  tile.first_col = 0;
  return tile;
}

template <int N>
METAL_FUNC void store_partial_row(
    thread Fragment (&fragments)[N], float factor, device float* row, int num_cols, uint lane) {
  JFM_UNROLL for (int d = 0; d < N; d += 2) {
    if (d * 8 < num_cols) {
      store_fragments(fragments + d, factor, row + d * 8, num_cols - d * 8, lane);
    }
  }
}
