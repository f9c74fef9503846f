// dQ for short queries: split over the keys, then combine. (dK and dV need no kernel of
// their own: attention_backward_dkv is parallel over keys already.)

#include "attention_backward.h"
#include "attention_short.h"

// One simdgroup: the part of dQ, unscaled, of 8 packed rows from one split of the keys.
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_short_dq(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8, "a simdgroup owns 8 packed rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(BLOCK_KV <= 32, "block_is_hidden");
  const uint3 group = whole_grid(params, position);

  const int split = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (split >= params.num_splits) return;  // whole simdgroups leave; there are no barriers
  const int row_blocks = num_row_blocks(params);
  const int kv_head = int(group.y) / row_blocks;
  const PackedRow row =
      packed_row(params, kv_head, int(group.y) % row_blocks, fragment_row(lane), group.z);

  query += head_offset(params, params.query, group.z, row.head) + row.query * params.query.row;
  dout += head_offset(params, params.dout, group.z, row.head) + row.query * params.dout.row;
  delta += head_offset(params, params.delta, group.z, row.head);
  const Matrix<T> keys_matrix =
      key_matrix(params, key, params.key, group.z, kv_head, head_dim);
  const Matrix<T> values_matrix =
      key_matrix(params, value, params.value, group.z, kv_head, value_head_dim);
  const RowStatistics statistics = load_row_statistics(params, delta, row.query);

  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  // The rows of a simdgroup have different heads, but one batch index.
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, row.head);

  const RowFragments<T, HEAD_DIM, 1, false> query_rows = packed_rows<HEAD_DIM>(query, head_dim);
  const RowFragments<T, HEAD_DIM, 1, false> dout_rows = packed_rows<HEAD_DIM>(dout, value_head_dim);
  Fragment dq[HEAD_DIM / 8];
  clear(dq);

  const Range keys = visible_keys(params, operands, row.query);
  const int split_start = split * params.keys_per_split;
  const Range block_keys = visible_keys_of_block(params, operands, 0, params.q_len);
  const int end_key = min(split_start + params.keys_per_split, block_keys.end);
  for (int first_key = max(split_start, block_keys.begin / BLOCK_KV * BLOCK_KV);
       first_key < end_key; first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, 0, params.q_len, first_key, BLOCK_KV, lane)) continue;
    Fragment s[BLOCK_KV / 8];
    Fragment dp[BLOCK_KV / 8];
    const Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> key_tile =
        device_tile<HEAD_DIM, BLOCK_KV>(rows_from(keys_matrix, first_key));
    const Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> value_tile =
        device_tile<HEAD_DIM, BLOCK_KV>(rows_from(values_matrix, first_key));
    clear(s);
    multiply_transposed(s, query_rows, key_tile, lane);
    clear(dp);
    multiply_transposed(dp, dout_rows, value_tile, lane);
    const bool is_interior =
        block_is_interior(params, operands, 0, params.q_len, first_key, BLOCK_KV);
    score_gradients<BLOCK_KV / 8>(
        params, operands, s, dp, is_interior, keys, row.query, row.valid, first_key, statistics,
        lane);
    if (is_interior) {
      multiply_accumulate<HEAD_DIM, 1>(dq, s, key_tile, 0, lane);
    } else {
      multiply_accumulate_finite<HEAD_DIM, 1>(dq, s, key_tile, 0, lane);
    }
  }

  if (!row.valid) return;
  const long partial_index = split * num_partial_rows(params) + row.index;
  store_partial_row(dq, 1.0f, partial + partial_index * head_dim, head_dim, lane);
}

// dQ = scale · Σ of the splits, one row per simdgroup.
//
// Grid: x = block of NUM_SIMDGROUPS rows.
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_short_dq_combine(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device T* dquery [[buffer(JFM_BUFFER_DQUERY)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const long num_rows = num_partial_rows(params);
  const long row = long(group.x) * NUM_SIMDGROUPS + simdgroup;
  if (row >= num_rows) return;
  device T* dquery_row = dquery + partial_row_offset(params, params.dquery, row);
  for (int c = int(lane); c < head_dim; c += 32) {
    float sum = 0.0f;
    for (int s = 0; s < params.num_splits; ++s) sum += partial[(s * num_rows + row) * head_dim + c];
    dquery_row[c] = T(sum * params.scale);
  }
}
