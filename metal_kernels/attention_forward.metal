// Forward attention, tiled: out and logsumexp of one block of queries per threadgroup.
//
// Each simdgroup owns 8 query rows; the threadgroup shares tiles of K and V.
//   for each block of keys that some row of the block sees:
//     tile <- K;  S = Q Kᵀ;  x = score(S), -inf where hidden (attention_scores.h)
//     m' = max(m, rowmax x);  P = exp(x - m');  l = l·exp(m - m') + rowsum P
//     tile <- V;  O = O·exp(m - m') + dropout(P) V
//   l += exp(sink - m);  out = O / l;  logsumexp = m + log l
// S and P stay in registers (online softmax: Milakov and Gimelshein, arXiv:1805.02867;
// tiling: FlashAttention-2, arXiv:2307.08691).
//
// Grid: x = query block, y = query head, z = batch index (all batch dimensions).

#include "attention_softmax.h"

template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_forward(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device T* out [[buffer(JFM_BUFFER_OUT)]],
    device float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const float* sinks [[buffer(JFM_BUFFER_SINKS), function_constant(has_sinks)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 query rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  static_assert(BLOCK_Q <= 32 && BLOCK_KV <= 32, "block_is_hidden");
  const uint3 group = whole_grid(params, position);
  constexpr int kKeyFragments = BLOCK_KV / 8;
  constexpr int kDimFragments = HEAD_DIM / 8;
  constexpr int kTileStride = tile_row_stride<T, HEAD_DIM>();
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  // Above 128 the query's fragments would not leave registers enough for O.
  constexpr bool kKeepQuery = HEAD_DIM <= 128;

  threadgroup T tile[BLOCK_KV * kTileStride];
  threadgroup uint found_nonfinite[NUM_SIMDGROUPS];

  const uint thread_index = simdgroup * 32 + lane;
  const int head = int(group.y);
  const int kv_head = head / params.num_groups;
  const int first_query = int(group.x) * BLOCK_Q;
  const int first_row = first_query + int(simdgroup) * 8;
  const int row = first_row + fragment_row(lane);

  query += head_offset(params, params.query, group.z, head);
  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);
  out += head_offset(params, params.out, group.z, head);
  logsumexp += head_offset(params, params.logsumexp, group.z, head);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);

  RowFragments<T, HEAD_DIM, kKeepQuery> q;
  load_rows(q, query, params.query.row, first_row, params.q_len, head_dim, lane);
  Fragment o[kDimFragments];
  clear(o);
  SoftmaxRow softmax = empty_softmax_row();

  const Range keys = visible_keys(params, operands, row);
  const Range block_keys = visible_keys_of_block(params, operands, first_query, BLOCK_Q);
  for (int first_key = block_keys.begin / BLOCK_KV * BLOCK_KV; first_key < block_keys.end;
       first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
      continue;
    }
    // S = Q Kᵀ
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last V tile is used up
    load_tile<T, BLOCK_KV, HEAD_DIM, kThreads, false>(  // scores must show a NaN
        tile, key, params.key.row, first_key, params.kv_len, head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragment s[kKeyFragments];
    multiply_transposed(s, q, tile, lane);

    const float correction =
        update_softmax(params, operands, softmax, s, keys, row, first_key, lane);
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
    multiply_accumulate<T, HEAD_DIM>(o, s, tile, value_head_dim, lane);
    uint nonfinite = 0;
    JFM_UNROLL for (int i = 0; i < NUM_SIMDGROUPS; ++i) nonfinite |= found_nonfinite[i];
    // Rare: a row that sees such a value becomes NaN.
    if (nonfinite != 0 &&
        sees_nonfinite_value(params, operands, keys, row, first_key, BLOCK_KV, value)) {
      softmax.sum = quiet_nan();
    }
  }

  softmax.sum = row_sum(softmax.sum);
  float sink = 0.0f;
  if (has_sinks) sink = sinks[head_offset(params, params.sinks, group.z, head)];
  const SoftmaxResult result = finish_softmax(softmax, sink);
  store_rows(
      o, result.factor, out, params.out.row, first_row, params.q_len, value_head_dim, lane);
  if (row < params.q_len && fragment_col(lane) == 0) {
    logsumexp[row * params.logsumexp.row] = result.logsumexp;
  }
}
