// Forward attention, tiled: out and logsumexp of one block of queries per threadgroup.
//
// Each simdgroup owns 8 query rows; the threadgroup shares tiles of K and V.
//   for each block of keys that some row of the block sees:
//     tile <- K;  S = Q Kᵀ;  x = S · scale · log2(e), -inf where hidden
//     m' = max(m, rowmax x);  P = exp2(x - m');  l = l·exp2(m - m') + rowsum P
//     tile <- V;  O = O·exp2(m - m') + P V
//   out = O / l;  logsumexp = ln2 · (m + log2 l)
// S and P stay in registers; softmax in the log2 domain (online softmax: Milakov and
// Gimelshein, arXiv:1805.02867; tiling: FlashAttention-2, arXiv:2307.08691).
//
// Grid: x = query block, y = query head, z = batch index (all batch dimensions).

#include "attention_common.h"

template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_forward(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device T* out [[buffer(JFM_BUFFER_OUT)]],
    device float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
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
  // Above 128 the query's fragments would not leave registers enough for O.
  constexpr bool kKeepQuery = HEAD_DIM <= 128;

  threadgroup T tile[BLOCK_KV * kTileStride];
  threadgroup uint found_nonfinite[NUM_SIMDGROUPS];

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
  out += head_offset(params, params.out, group.z, head);
  logsumexp += head_offset(params, params.logsumexp, group.z, head);

  Fragment q[kKeepQuery ? kDimFragments : 1];
  if (kKeepQuery) {
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < dim_fragments) {
        q[kKeepQuery ? d : 0] = load_fragment(
            query, params.query.row, row, d * 8 + col, params.q_len, head_dim);
      }
    }
  }

  Fragment o[kDimFragments];
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) o[d] = zero_fragment();
  float m = JFM_MOST_NEGATIVE;
  float l = 0.0f;  // this lane's part of the row sum

  const int end_key = end_of_visible_keys(params, first_query + BLOCK_Q - 1);
  for (int first_key = 0; first_key < end_key; first_key += BLOCK_KV) {
    // S = Q Kᵀ
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last V tile is used up
    load_tile<T, BLOCK_KV, HEAD_DIM, kThreads, false>(  // scores must show a NaN
        tile, key, params.key.row, first_key, params.kv_len, head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragment s[kKeyFragments];
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) s[j] = zero_fragment();
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < dim_fragments) {
        Fragment a;
        if (kKeepQuery) {
          a = q[kKeepQuery ? d : 0];
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

    // online softmax
    float block_max = -INFINITY;
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const bool visible = is_visible(params, row, first_key + j * 8 + col + e);
        const float x = visible ? s[j].thread_elements()[e] * params.scale_log2 : -INFINITY;
        s[j].thread_elements()[e] = x;
        block_max = max(block_max, x);
      }
    }
    const float new_m = max(m, row_max(block_max));
    const float correction = exp2(m - new_m);
    m = new_m;
    l *= correction;
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const float p = exp2(s[j].thread_elements()[e] - m);
        s[j].thread_elements()[e] = p;
        l += p;
      }
    }
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      o[d].thread_elements()[0] *= correction;
      o[d].thread_elements()[1] *= correction;
    }

    // O += P V
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the K tile is used up
    const bool found = load_tile<T, BLOCK_KV, HEAD_DIM, kThreads, true>(
        tile, value, params.value.row, first_key, params.kv_len, value_head_dim, thread_index);
    const bool found_any = simd_any(found);
    if (lane == 0) found_nonfinite[simdgroup] = found_any ? 1 : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
        if (d < value_fragments) {
          Fragment b = tile_fragment(
              tile, kTileStride, j * 8 + fragment_row(lane), d * 8 + col);
          simdgroup_multiply_accumulate(o[d], s[j], b, o[d]);
        }
      }
    }
    uint nonfinite = 0;
    JFM_UNROLL for (int i = 0; i < NUM_SIMDGROUPS; ++i) nonfinite |= found_nonfinite[i];
    if (nonfinite != 0) {  // rare: a row that sees such a value becomes NaN
      for (int j = 0; j < BLOCK_KV; ++j) {
        const int key_index = first_key + j;
        if (key_index < params.kv_len && is_visible(params, row, key_index) &&
            !row_is_finite(value + key_index * params.value.row, value_head_dim)) {
          l = quiet_nan();
        }
      }
    }
  }

  l = row_sum(l);
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    if (d < value_fragments) {
      store_fragment(
          o[d], inverse, out, params.out.row, row, d * 8 + col, params.q_len, value_head_dim);
    }
  }
  if (row < params.q_len && col == 0) {
    logsumexp[row * params.logsumexp.row] = l == 0.0f ? -INFINITY : JFM_LN2 * (m + log2(l));
  }
}
