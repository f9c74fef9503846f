// dK and dV of one block of keys per threadgroup; no atomics, each simdgroup owns 8 keys.
//   for each query head of the group, for each block of queries that sees the block:
//     tiles <- Q, dO
//     Sᵀ = K Qᵀ;  dPᵀ = V dOᵀ;  Pᵀ and dSᵀ from them (attention_backward.h)
//     dV += dropout(Pᵀ) dO;  dK += dSᵀ Q
//   dK *= scale
// The sum over the heads of a group and over queries is in a fixed order: deterministic.
//
// Grid: x = key block, y = key/value head, z = batch index.

#include "attention_backward.h"

template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_backward_dkv(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device T* dkey [[buffer(JFM_BUFFER_DKEY)]],
    device T* dvalue [[buffer(JFM_BUFFER_DVALUE)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_KV == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 keys");
  static_assert(BLOCK_Q % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  static_assert(BLOCK_Q <= 32 && BLOCK_KV <= 32, "block_is_hidden");
  const uint3 group = whole_grid(params, position);
  constexpr int kQueryFragments = BLOCK_Q / 8;
  constexpr int kTileStride = tile_row_stride<T, HEAD_DIM>();
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  // dK and dV take 1/2 HEAD_DIM registers; K and V join them only up to 64.
  constexpr bool kKeepRows = HEAD_DIM <= 64;

  threadgroup T query_tile[BLOCK_Q * kTileStride];
  threadgroup T dout_tile[BLOCK_Q * kTileStride];

  const uint thread_index = simdgroup * 32 + lane;
  const int kv_head = int(group.y);
  const int first_key = int(group.x) * BLOCK_KV;
  const int first_row = first_key + int(simdgroup) * 8;  // rows are keys here
  const int row = first_row + fragment_row(lane);

  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  dkey += head_offset(params, params.dkey, group.z, kv_head);
  dvalue += head_offset(params, params.dvalue, group.z, kv_head);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);

  RowFragments<T, HEAD_DIM, kKeepRows> k;
  RowFragments<T, HEAD_DIM, kKeepRows> v;
  load_rows(k, key, params.key.row, first_row, params.kv_len, head_dim, lane);
  load_rows(v, value, params.value.row, first_row, params.kv_len, value_head_dim, lane);
  Fragment dk[HEAD_DIM / 8];
  Fragment dv[HEAD_DIM / 8];
  clear(dk);
  clear(dv);

  for (int g = 0; g < params.num_groups; ++g) {
    const int head = kv_head * params.num_groups + g;
    const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);
    device const T* q = query + head_offset(params, params.query, group.z, head);
    device const T* go = dout + head_offset(params, params.dout, group.z, head);
    device const float* lse = logsumexp + head_offset(params, params.logsumexp, group.z, head);
    device const float* dl = delta + head_offset(params, params.delta, group.z, head);

    const Range queries = visible_queries(params, operands, row);
    const Range block_queries = visible_queries_of_block(params, operands, first_key, BLOCK_KV);
    for (int first_query = block_queries.begin / BLOCK_Q * BLOCK_Q;
         first_query < block_queries.end; first_query += BLOCK_Q) {
      if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
        continue;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tiles are used up
      load_tile<T, BLOCK_Q, HEAD_DIM, kThreads, true>(
          query_tile, q, params.query.row, first_query, params.q_len, head_dim, thread_index);
      load_tile<T, BLOCK_Q, HEAD_DIM, kThreads, true>(
          dout_tile, go, params.dout.row, first_query, params.q_len, value_head_dim, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      Fragment s[kQueryFragments];  // Sᵀ = K Qᵀ
      Fragment dp[kQueryFragments];  // dPᵀ = V dOᵀ
      multiply_transposed(s, k, query_tile, lane);
      multiply_transposed(dp, v, dout_tile, lane);

      // Pᵀ in s, dSᵀ in dp
      JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) {
        JFM_UNROLL for (int e = 0; e < 2; ++e) {
          const int query_index = first_query + i * 8 + fragment_col(lane) + e;
          const RowStatistics statistics = load_row_statistics(params, lse, dl, query_index);
          uint word = 0;
          if (has_dropout) word = dropout_words(operands, query_index, row)[row % 2];
          float bias;
          const bool visible = key_is_seen(params, operands, queries, query_index, row, bias);
          const ScoreGradient gradient = score_gradient(
              params, operands, visible, query_index, row, s[i].thread_elements()[e],
              dp[i].thread_elements()[e], bias, word, statistics);
          s[i].thread_elements()[e] = gradient.p;
          dp[i].thread_elements()[e] = gradient.ds;
        }
      }

      multiply_accumulate<T, HEAD_DIM>(dv, s, dout_tile, value_head_dim, lane);
      multiply_accumulate<T, HEAD_DIM>(dk, dp, query_tile, head_dim, lane);
    }
  }

  store_rows(dk, params.scale, dkey, params.dkey.row, first_row, params.kv_len, head_dim, lane);
  store_rows(dv, 1.0f, dvalue, params.dvalue.row, first_row, params.kv_len, value_head_dim, lane);
}
