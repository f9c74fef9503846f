// dQ of one block of queries per threadgroup; no atomics, each simdgroup owns 8 rows.
//   for each block of keys that some row of the block sees:
//     tile <- V;  dP = dO Vᵀ
//     tile <- K;  S = Q Kᵀ;  P = exp2(scale·log2(e)·S - lse);  dS = P ∘ (dP - delta)
//                 dQ += dS K
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
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 query rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  const uint3 group = whole_grid(params, position);
  constexpr int kKeyFragments = BLOCK_KV / 8;
  constexpr int kDimFragments = HEAD_DIM / 8;
  constexpr int kTileStride = tile_row_stride<T, HEAD_DIM>();
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  // Q, dO and dQ together take 3/4 HEAD_DIM registers; above 64 the two inputs are read
  // again from (cached) device memory.
  constexpr bool kKeepRows = HEAD_DIM <= 64;

  threadgroup T tile[BLOCK_KV * kTileStride];

  const int dim_fragments = (head_dim + 7) / 8;
  const int value_fragments = (value_head_dim + 7) / 8;
  const uint thread_index = simdgroup * 32 + lane;
  const int head = int(group.y);
  const int kv_head = head / params.num_groups;
  const int first_query = int(group.x) * BLOCK_Q;
  const int row = first_query + int(simdgroup) * 8 + fragment_row(lane);
  const int col = fragment_col(lane);

  query += head_offset(params, params.query, group.z, head);
  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  dout += head_offset(params, params.dout, group.z, head);
  dquery += head_offset(params, params.dquery, group.z, head);
  logsumexp += head_offset(params, params.logsumexp, group.z, head);
  delta += head_offset(params, params.delta, group.z, head);
  const RowStatistics statistics = load_row_statistics(params, logsumexp, delta, row);

  Fragment q[kKeepRows ? kDimFragments : 1];
  Fragment g[kKeepRows ? kDimFragments : 1];
  if (kKeepRows) {
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      const int c = d * 8 + col;
      if (d < dim_fragments) {
        q[kKeepRows ? d : 0] =
            load_fragment(query, params.query.row, row, c, params.q_len, head_dim);
      }
      if (d < value_fragments) {
        g[kKeepRows ? d : 0] =
            load_fragment(dout, params.dout.row, row, c, params.q_len, value_head_dim);
      }
    }
  }
  Fragment dq[kDimFragments];
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) dq[d] = zero_fragment();

  const int end_key = end_of_visible_keys(params, first_query + BLOCK_Q - 1);
  for (int first_key = 0; first_key < end_key; first_key += BLOCK_KV) {
    // dP = dO Vᵀ
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last K tile is used up
    load_tile<T, BLOCK_KV, HEAD_DIM, kThreads, true>(
        tile, value, params.value.row, first_key, params.kv_len, value_head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragment dp[kKeyFragments];
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) dp[j] = zero_fragment();
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < value_fragments) {
        Fragment a;
        if (kKeepRows) {
          a = g[kKeepRows ? d : 0];
        } else {
          a = load_fragment(dout, params.dout.row, row, d * 8 + col, params.q_len, value_head_dim);
        }
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = tile_fragment_transposed(
              tile, kTileStride, d * 8 + fragment_row(lane), j * 8 + col);
          simdgroup_multiply_accumulate(dp[j], a, b, dp[j]);
        }
      }
    }

    // S = Q Kᵀ
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the V tile is used up
    load_tile<T, BLOCK_KV, HEAD_DIM, kThreads, true>(
        tile, key, params.key.row, first_key, params.kv_len, head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragment s[kKeyFragments];
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) s[j] = zero_fragment();
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < dim_fragments) {
        Fragment a;
        if (kKeepRows) {
          a = q[kKeepRows ? d : 0];
        } else {
          a = load_fragment(query, params.query.row, row, d * 8 + col, params.q_len, head_dim);
        }
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = tile_fragment_transposed(
              tile, kTileStride, d * 8 + fragment_row(lane), j * 8 + col);
          simdgroup_multiply_accumulate(s[j], a, b, s[j]);
        }
      }
    }

    // dS = P ∘ (dP - delta), in s
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const bool visible = is_visible_pair(params, row, first_key + j * 8 + col + e);
        float p, ds;
        score_gradient(
            params, visible, s[j].thread_elements()[e], dp[j].thread_elements()[e], statistics, p,
            ds);
        s[j].thread_elements()[e] = ds;
      }
    }

    // dQ += dS K
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
        if (d < dim_fragments) {
          Fragment b = tile_fragment(
              tile, kTileStride, j * 8 + fragment_row(lane), d * 8 + col);
          simdgroup_multiply_accumulate(dq[d], s[j], b, dq[d]);
        }
      }
    }
  }

  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    if (d < dim_fragments) {
      store_fragment(
          dq[d], params.scale, dquery, params.dquery.row, row, d * 8 + col, params.q_len,
          head_dim);
    }
  }
}
