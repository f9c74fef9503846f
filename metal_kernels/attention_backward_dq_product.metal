// dQ from the dS that attention_backward_dkv wrote down, as a plain product: one of five, where
// attention_backward_dq makes seven of them. Each simdgroup owns BLOCK_D columns of rows of dQ
// and shares nothing; blocks of columns read dS again, but keep more rows per key.
//   for each block of keys of the chunk that some row of the simdgroup sees:
//     dQ += dS K
//   dQ *= scale, at the last chunk of keys; before that it is kept in float32
//
// Grid: x = query block, y = query head * blocks of columns + block of columns, z = batch index.

#include "attention_backward.h"

// Whether attention_backward_dkv wrote the dS of its block of queries from `first` on with a block
// of keys, of which `queries` is visible_queries_of_block: it has the same test. The simdgroup
// calls it together.
METAL_FUNC bool score_gradient_is_written(
    constant AttentionParams& params, thread const ScoreOperands& operands, Range queries,
    int first, int first_key, uint lane) {
  return first < queries.end && first + params.score_block_q > queries.begin &&
         !block_is_hidden(
             params, operands, first, params.score_block_q, first_key, params.score_block_kv,
             lane);
}

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_backward_dq_product(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device T* dquery [[buffer(JFM_BUFFER_DQUERY)]],
    device const typename ScoreGradient<T>::type* score_gradient
        [[buffer(JFM_BUFFER_SCORE_GRADIENT)]],
    device float* dquery_sum [[buffer(JFM_BUFFER_DQUERY_SUM)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q % (8 * NUM_SIMDGROUPS) == 0, "a simdgroup owns whole fragments");
  static_assert(HEAD_DIM % BLOCK_D == 0 && BLOCK_D % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(LOADS == JFM_LOADS_DEVICE, "one simdgroup has no use for another's keys");
  constexpr int kRows = BLOCK_Q / (8 * NUM_SIMDGROUPS);  // fragments
  constexpr int kDims = BLOCK_D / 8;
  typedef typename ScoreGradient<T>::type Scratch;

  const uint3 group = whole_grid(params, position);
  const int col_blocks = (head_dim + BLOCK_D - 1) / BLOCK_D;
  const int head = int(group.y) / col_blocks;
  const int first_col = int(group.y) % col_blocks * BLOCK_D;
  const int num_cols = head_dim - first_col;
  const int first_row =
      query_block(params, group.x, BLOCK_Q) * BLOCK_Q + int(simdgroup) * 8 * kRows;
  if (first_row >= params.q_len) return;  // whole simdgroups leave; there are no barriers
  const long pair = long(group.z) * params.num_heads + head - params.first_pair;
  const Matrix<T> keys_matrix = key_matrix(
      params, key + first_col, params.key, group.z, head / params.num_groups, num_cols);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);

  Fragment dq[kRows * kDims];
  clear(dq);
  device float* sums = dquery_sum + pair * params.q_len * head_dim + first_col;
  if (!params.is_first_chunk) {
    const Matrix<float> sums_matrix = make_matrix(
        (device const float*)sums + first_row * long(head_dim), long(head_dim),
        params.q_len - first_row, num_cols, aligned_q);
    JFM_UNROLL for (int r = 0; r < kRows; ++r) {
      JFM_UNROLL for (int d = 0; d < kDims; d += 2) {
        if (d * 8 < num_cols) {
          load_fragments(
              dq + r * kDims + d,
              matrix_row(sums_matrix, r * 8 + fragment_row(lane)) + d * 8, num_cols - d * 8,
              lane);
        }
      }
    }
  }

  const Range row_keys = visible_keys_of_block(params, operands, first_row, 8 * kRows);
  const int begin = max(row_keys.begin, params.first_chunk_key);
  const int end = min(row_keys.end, params.end_chunk_key);
  const int block = params.score_block_kv;
  for (int first_key = begin / block * block; first_key < end; first_key += block) {
    const Range queries = visible_queries_of_block(params, operands, first_key, block);
    bool is_written[kRows];
    bool is_any_written = false;
    int tested = -1;
    bool block_is_written = false;
    JFM_UNROLL for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r * 8;
      const int first = row / params.score_block_q * params.score_block_q;
      if (first != tested && row < params.q_len) {
        tested = first;
        block_is_written =
            score_gradient_is_written(params, operands, queries, first, first_key, lane);
      }
      is_written[r] = row < params.q_len && block_is_written;
      is_any_written = is_any_written || is_written[r];
    }
    if (!is_any_written) continue;
    // 0 times NaN, of a hidden key or beside a row that is not written.
    const bool sanitizes =
        !block_is_interior(params, operands, first_row, 8 * kRows, first_key, block);
    for (int k = first_key; k < min(first_key + block, end); k += 8) {
      device const T* key_row = matrix_row(rows_from(keys_matrix, k), fragment_row(lane));
      OperandFragment<Scratch> ds[kRows];
      JFM_UNROLL for (int r = 0; r < kRows; ++r) {
        ds[r].thread_elements()[0] = Scratch(0.0f);
        ds[r].thread_elements()[1] = Scratch(0.0f);
        if (is_written[r]) {
          ds[r] = load_score_gradient(params, score_gradient, pair, first_row / 8 + r, k, lane);
        }
      }
      JFM_UNROLL for (int d = 0; d < kDims; d += 2) {
        OperandFragment<T> b[2];
        if (d * 8 < num_cols) load_fragments(b, key_row + d * 8, num_cols - d * 8, lane);
        JFM_UNROLL for (int i = 0; i < 2; ++i) {
          if ((d + i) * 8 < num_cols) {
            if (sanitizes) sanitize(b[i]);
            JFM_UNROLL for (int r = 0; r < kRows; ++r) {
              thread Fragment& sum = dq[r * kDims + d + i];
              simdgroup_multiply_accumulate(sum, ds[r], b[i], sum);
            }
          }
        }
      }
    }
  }

  if (!params.is_last_chunk) {
    store_all_rows<BLOCK_D, kRows>(
        dq, 1.0f, sums, long(head_dim), first_row, params.q_len, num_cols, lane);
    return;
  }
  store_all_rows<BLOCK_D, kRows>(
      dq, params.scale,
      dquery + head_offset(params, params.dquery, group.z, head) + first_col,
      params.dquery.row, first_row, params.q_len, num_cols, lane);
}
