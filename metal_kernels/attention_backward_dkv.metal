// dK and dV of one block of keys per threadgroup; no atomics, each simdgroup owns 8 keys.
//   for each query head of the group, for each block of queries that sees the block:
//     tiles <- Q, dO
//     Sᵀ = K Qᵀ;  Pᵀ = exp2(scale·log2(e)·Sᵀ - lse);  dPᵀ = V dOᵀ;  dSᵀ = Pᵀ ∘ (dPᵀ - delta)
//     dV += Pᵀ dO;  dK += dSᵀ Q
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
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_KV == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 keys");
  static_assert(BLOCK_Q % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  const uint3 group = whole_grid(params, position);
  constexpr int kQueryFragments = BLOCK_Q / 8;
  constexpr int kDimFragments = HEAD_DIM / 8;
  constexpr int kTileStride = tile_row_stride<T, HEAD_DIM>();
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  // dK and dV take 1/2 HEAD_DIM registers; K and V join them only up to 64.
  constexpr bool kKeepRows = HEAD_DIM <= 64;

  threadgroup T query_tile[BLOCK_Q * kTileStride];
  threadgroup T dout_tile[BLOCK_Q * kTileStride];

  const int dim_fragments = (head_dim + 7) / 8;
  const int value_fragments = (value_head_dim + 7) / 8;
  const uint thread_index = simdgroup * 32 + lane;
  const int kv_head = int(group.y);
  const int first_key = int(group.x) * BLOCK_KV;
  const int row = first_key + int(simdgroup) * 8 + fragment_row(lane);  // a key
  const int col = fragment_col(lane);                                   // a query

  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  dkey += head_offset(params, params.dkey, group.z, kv_head);
  dvalue += head_offset(params, params.dvalue, group.z, kv_head);

  Fragment k[kKeepRows ? kDimFragments : 1];
  Fragment v[kKeepRows ? kDimFragments : 1];
  if (kKeepRows) {
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      const int c = d * 8 + col;
      if (d < dim_fragments) {
        k[kKeepRows ? d : 0] = load_fragment(key, params.key.row, row, c, params.kv_len, head_dim);
      }
      if (d < value_fragments) {
        v[kKeepRows ? d : 0] =
            load_fragment(value, params.value.row, row, c, params.kv_len, value_head_dim);
      }
    }
  }
  Fragment dk[kDimFragments];
  Fragment dv[kDimFragments];
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    dk[d] = zero_fragment();
    dv[d] = zero_fragment();
  }

  // The first query that sees the first key of the block.
  const int first_visible = is_causal ? max(0, first_key - params.q_offset) : 0;
  const int first_block = first_visible / BLOCK_Q * BLOCK_Q;
  for (int g = 0; g < params.num_groups; ++g) {
    const int head = kv_head * params.num_groups + g;
    device const T* q = query + head_offset(params, params.query, group.z, head);
    device const T* go = dout + head_offset(params, params.dout, group.z, head);
    device const float* lse = logsumexp + head_offset(params, params.logsumexp, group.z, head);
    device const float* dl = delta + head_offset(params, params.delta, group.z, head);

    for (int first_query = first_block; first_query < params.q_len; first_query += BLOCK_Q) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tiles are used up
      load_tile<T, BLOCK_Q, HEAD_DIM, kThreads, true>(
          query_tile, q, params.query.row, first_query, params.q_len, head_dim, thread_index);
      load_tile<T, BLOCK_Q, HEAD_DIM, kThreads, true>(
          dout_tile, go, params.dout.row, first_query, params.q_len, value_head_dim, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      // Sᵀ = K Qᵀ
      Fragment s[kQueryFragments];
      JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) s[i] = zero_fragment();
      JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
        if (d < dim_fragments) {
          Fragment a;
          if (kKeepRows) {
            a = k[kKeepRows ? d : 0];
          } else {
            a = load_fragment(key, params.key.row, row, d * 8 + col, params.kv_len, head_dim);
          }
          JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) {
            Fragment b = tile_fragment_transposed(
                query_tile, kTileStride, d * 8 + fragment_row(lane), i * 8 + col);
            simdgroup_multiply_accumulate(s[i], a, b, s[i]);
          }
        }
      }

      // dPᵀ = V dOᵀ
      Fragment dp[kQueryFragments];
      JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) dp[i] = zero_fragment();
      JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
        if (d < value_fragments) {
          Fragment a;
          if (kKeepRows) {
            a = v[kKeepRows ? d : 0];
          } else {
            a = load_fragment(
                value, params.value.row, row, d * 8 + col, params.kv_len, value_head_dim);
          }
          JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) {
            Fragment b = tile_fragment_transposed(
                dout_tile, kTileStride, d * 8 + fragment_row(lane), i * 8 + col);
            simdgroup_multiply_accumulate(dp[i], a, b, dp[i]);
          }
        }
      }

      // Pᵀ in s, dSᵀ in dp
      JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) {
        JFM_UNROLL for (int e = 0; e < 2; ++e) {
          const int query_index = first_query + i * 8 + col + e;
          const RowStatistics statistics = load_row_statistics(params, lse, dl, query_index);
          const bool visible = is_visible_pair(params, query_index, row);
          float p, ds;
          score_gradient(
              params, visible, s[i].thread_elements()[e], dp[i].thread_elements()[e], statistics,
              p, ds);
          s[i].thread_elements()[e] = p;
          dp[i].thread_elements()[e] = ds;
        }
      }

      // dV += Pᵀ dO;  dK += dSᵀ Q
      JFM_UNROLL for (int i = 0; i < kQueryFragments; ++i) {
        JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
          if (d < value_fragments) {
            Fragment b = tile_fragment(
                dout_tile, kTileStride, i * 8 + fragment_row(lane), d * 8 + col);
            simdgroup_multiply_accumulate(dv[d], s[i], b, dv[d]);
          }
          if (d < dim_fragments) {
            Fragment b = tile_fragment(
                query_tile, kTileStride, i * 8 + fragment_row(lane), d * 8 + col);
            simdgroup_multiply_accumulate(dk[d], dp[i], b, dk[d]);
          }
        }
      }
    }
  }

  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    const int c = d * 8 + col;
    if (d < dim_fragments) {
      store_fragment(
          dk[d], params.scale, dkey, params.dkey.row, row, c, params.kv_len, head_dim);
    }
    if (d < value_fragments) {
      store_fragment(
          dv[d], 1.0f, dvalue, params.dvalue.row, row, c, params.kv_len, value_head_dim);
    }
  }
}
