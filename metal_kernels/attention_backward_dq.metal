// dQ of one block of queries per threadgroup; no atomics, each simdgroup owns 8 rows.
//   for each block of keys that some row of the block sees:
//     tile <- V;  dP = dO Vᵀ
//     tile <- K;  S = Q Kᵀ;  dS from S and dP (attention_backward.h);  dQ += dS K
//   dQ *= scale
// P and dS stay in registers (FlashAttention-2's backward, arXiv:2307.08691).
//
// Grid: x = query block, y = query head, z = batch index.

#include "attention_backward.h"

template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_backward_dq(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device T* dquery [[buffer(JFM_BUFFER_DQUERY)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 query rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  static_assert(BLOCK_Q <= 32 && BLOCK_KV <= 32, "block_is_hidden");
  const uint3 group = whole_grid(params, position);
  constexpr int kTileStride = tile_row_stride<T, HEAD_DIM>();
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  // Q, dO and dQ together take 3/4 HEAD_DIM registers; above 64 the two inputs are read
  // again from (cached) device memory.
  constexpr bool kKeepRows = HEAD_DIM <= 64;

  threadgroup T tile[BLOCK_KV * kTileStride];

  const uint thread_index = simdgroup * 32 + lane;
  const int head = int(group.y);
  const int kv_head = head / params.num_groups;
  const int first_query = int(group.x) * BLOCK_Q;
  const int first_row = first_query + int(simdgroup) * 8;
  const int row = first_row + fragment_row(lane);

  query += head_offset(params, params.query, group.z, head);
  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  dout += head_offset(params, params.dout, group.z, head);
  dquery += head_offset(params, params.dquery, group.z, head);
  logsumexp += head_offset(params, params.logsumexp, group.z, head);
  delta += head_offset(params, params.delta, group.z, head);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);
  const RowStatistics statistics = load_row_statistics(params, logsumexp, delta, row);

  RowFragments<T, HEAD_DIM, kKeepRows> q;
  RowFragments<T, HEAD_DIM, kKeepRows> g;
  load_rows(q, query, params.query.row, first_row, params.q_len, head_dim, lane);
  load_rows(g, dout, params.dout.row, first_row, params.q_len, value_head_dim, lane);
  Fragment dq[HEAD_DIM / 8];
  clear(dq);

  const Range keys = visible_keys(params, operands, row);
  const Range block_keys = visible_keys_of_block(params, operands, first_query, BLOCK_Q);
  for (int first_key = block_keys.begin / BLOCK_KV * BLOCK_KV; first_key < block_keys.end;
       first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
      continue;
    }
    Fragment ds[BLOCK_KV / 8];
    score_gradients_of_rows<T, HEAD_DIM, BLOCK_KV, kThreads>(
        params, operands, q, g, key, value, keys, first_key, statistics, tile, thread_index, ds);
    multiply_accumulate<T, HEAD_DIM>(dq, ds, tile, head_dim, lane);
  }
  store_rows(dq, params.scale, dquery, params.dquery.row, first_row, params.q_len, head_dim, lane);
}
