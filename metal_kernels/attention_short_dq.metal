// dQ for short queries: split over the keys, then combine. (dK and dV need no kernel of
// their own: attention_backward_dkv is parallel over keys already.)

#include "attention_short.h"

// One simdgroup: the part of dQ, unscaled, of 8 packed rows from one split of the keys.
template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_short_dq(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8, "a simdgroup owns 8 packed rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  const uint3 group = whole_grid(params, position);
  constexpr int kKeyFragments = BLOCK_KV / 8;
  constexpr int kDimFragments = HEAD_DIM / 8;

  const int split = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (split >= params.num_splits) return;  // whole simdgroups leave; there are no barriers
  const int dim_fragments = (head_dim + 7) / 8;
  const int value_fragments = (value_head_dim + 7) / 8;
  const int row_blocks = num_row_blocks(params);
  const int kv_head = int(group.y) / row_blocks;
  const int col = fragment_col(lane);
  const PackedRow row =
      packed_row(params, kv_head, int(group.y) % row_blocks, fragment_row(lane), group.z);

  query += head_offset(params, params.query, group.z, row.head) + row.query * params.query.row;
  dout += head_offset(params, params.dout, group.z, row.head) + row.query * params.dout.row;
  logsumexp += head_offset(params, params.logsumexp, group.z, row.head);
  delta += head_offset(params, params.delta, group.z, row.head);
  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  const RowStatistics statistics = load_row_statistics(params, logsumexp, delta, row.query);

  Fragment dq[kDimFragments];
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) dq[d] = zero_fragment();

  const int split_start = split * params.keys_per_split;
  const int split_end = min(
      split_start + params.keys_per_split, end_of_visible_keys(params, params.q_len - 1));
  for (int first_key = split_start; first_key < split_end; first_key += BLOCK_KV) {
    Fragment s[kKeyFragments];
    Fragment dp[kKeyFragments];
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      s[j] = zero_fragment();
      dp[j] = zero_fragment();
    }
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      const int c = d * 8 + col;
      if (d < dim_fragments) {
        Fragment a = load_row_fragment(query, row.valid, c, head_dim);
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = load_fragment_transposed(
              key, params.key.row, d * 8 + fragment_row(lane), first_key + j * 8 + col,
              params.kv_len, head_dim);
          simdgroup_multiply_accumulate(s[j], a, b, s[j]);
        }
      }
      if (d < value_fragments) {
        Fragment a = load_row_fragment(dout, row.valid, c, value_head_dim);
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = load_fragment_transposed(
              value, params.value.row, d * 8 + fragment_row(lane), first_key + j * 8 + col,
              params.kv_len, value_head_dim);
          simdgroup_multiply_accumulate(dp[j], a, b, dp[j]);
        }
      }
    }
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const int key_index = first_key + j * 8 + col + e;
        const bool visible = row.valid && is_visible(params, row.query, key_index);
        float p, ds;
        score_gradient(
            params, visible, s[j].thread_elements()[e], dp[j].thread_elements()[e], statistics, p,
            ds);
        s[j].thread_elements()[e] = ds;
      }
    }
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
        if (d < dim_fragments) {
          Fragment b = load_fragment(
              key, params.key.row, first_key + j * 8 + fragment_row(lane), d * 8 + col,
              params.kv_len, head_dim);
          sanitize(b);
          simdgroup_multiply_accumulate(dq[d], s[j], b, dq[d]);
        }
      }
    }
  }

  if (!row.valid) return;
  const long partial_index = split * num_partial_rows(params) + row.index;
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    if (d < dim_fragments) {
      store_partial(dq[d], 1.0f, partial + partial_index * head_dim, d * 8 + col, head_dim);
    }
  }
}

// dQ = scale · Σ of the splits, one row per simdgroup.
//
// Grid: x = block of NUM_SIMDGROUPS rows.
template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
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
