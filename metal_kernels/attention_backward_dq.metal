// dQ of one block of queries per threadgroup; no atomics, each simdgroup owns 8 or 16 rows.
//   for each block of keys that some row of the block sees:
//     dP = dO Vᵀ;  S = Q Kᵀ;  dS from S and dP (attention_backward.h);  dQ += dS K
//   dQ *= scale
// P and dS stay in registers (FlashAttention-2's backward, arXiv:2307.08691). With dK and dV
// from attention_backward_dkv these are seven products; attention_backward_dq_product makes
// it five where there is memory for dS.
//
// Grid: x = query block, y = query head, z = batch index.

#include "attention_backward.h"

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_backward_dq(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device T* dquery [[buffer(JFM_BUFFER_DQUERY)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q % (8 * NUM_SIMDGROUPS) == 0, "a simdgroup owns whole fragments");
  static_assert(BLOCK_KV % 8 == 0 && BLOCK_D % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(HEAD_DIM % BLOCK_D == 0, "tiles cut the columns");
  constexpr int kRows = BLOCK_Q / (8 * NUM_SIMDGROUPS);  // fragments
  constexpr int kKeys = BLOCK_KV / 8;
  constexpr int kDims = HEAD_DIM / 8;
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  constexpr bool kKeepRows =
      keeps_rows<T, HEAD_DIM, kRows>(2, 2 * kRows * (kDims + 2 * kKeys));

  threadgroup T shared[tile_size<T, BLOCK_KV, BLOCK_D, LOADS>()];

  const uint3 group = whole_grid(params, position);
  const uint thread_index = simdgroup * 32 + lane;
  const int head = int(group.y);
  const int first_query = query_block(params, group.x, BLOCK_Q) * BLOCK_Q;
  const int first_row = first_query + int(simdgroup) * 8 * kRows;

  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);
  QueryRows<T, HEAD_DIM, kRows, kKeepRows> rows;
  load_query_rows(
      params, operands, query, key, value, dout, delta, group.z, head, first_row, lane, rows);
  Tile<T, BLOCK_KV, BLOCK_D, LOADS> tile;
  tile.shared = shared;
  Fragment dq[kRows * kDims];
  clear(dq);

  const Range block_keys = visible_keys_of_block(params, operands, first_query, BLOCK_Q);
  for (int first_key = block_keys.begin / BLOCK_KV * BLOCK_KV; first_key < block_keys.end;
       first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
      continue;
    }
    const bool is_interior =
        block_is_interior(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV);
    Fragment ds[kRows * kKeys];
    score_gradients_of_rows<kThreads>(
        params, operands, rows, is_interior, !is_interior, first_key, tile, thread_index, ds);

    // dQ += dS K
    JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
      if (d < head_dim) {
        if (BLOCK_D != HEAD_DIM) {
          set_tile<kThreads>(
              tile, rows_from(rows.key, first_key), d, !is_interior, thread_index);
        }
        if (LOADS == JFM_LOADS_DEVICE && !is_interior) {
          multiply_accumulate_finite<HEAD_DIM, kRows>(dq, ds, tile, d, lane);
        } else {
          multiply_accumulate<HEAD_DIM, kRows>(dq, ds, tile, d, lane);
        }
      }
    }
  }
  store_all_rows<HEAD_DIM, kRows>(
      dq, params.scale, dquery + head_offset(params, params.dquery, group.z, head),
      params.dquery.row, first_row, params.q_len, head_dim, lane);
}
