// Forward attention, tiled: out and logsumexp of one block of queries per threadgroup.
//
// Each simdgroup owns 8 or 16 query rows; the simdgroups of a threadgroup share tiles of K and V.
//   for each block of keys that some row of the block sees:
//     S = Q Kᵀ, tile by tile;  x = score(S), -inf where hidden (attention_scores.h)
//     m' = max(m, rowmax x);  P = exp(x - m');  l = l·exp(m - m') + rowsum P
//     O = O·exp(m - m') + dropout(P) V, tile by tile
//   l += exp(sink - m);  out = O / l;  logsumexp = m + log l
// S and P stay in registers (online softmax: Milakov and Gimelshein, arXiv:1805.02867;
// tiling: FlashAttention-2, arXiv:2307.08691).
//
// Grid: x = query block, y = query head, z = batch index (all batch dimensions).

#include "attention_softmax.h"

JFM_VARIANT_TEMPLATE
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
  static_assert(BLOCK_Q % (8 * NUM_SIMDGROUPS) == 0, "a simdgroup owns whole fragments");
  static_assert(BLOCK_KV % 8 == 0 && BLOCK_D % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(HEAD_DIM % BLOCK_D == 0, "tiles cut the columns");
  constexpr int kRows = BLOCK_Q / (8 * NUM_SIMDGROUPS);  // fragments
  constexpr int kKeys = BLOCK_KV / 8;
  constexpr int kDims = HEAD_DIM / 8;
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  constexpr bool kKeepQuery =
      keeps_rows<T, HEAD_DIM, kRows>(1, 2 * kRows * (kDims + kKeys));

  threadgroup T shared[tile_size<T, BLOCK_KV, BLOCK_D, LOADS>()];
  threadgroup uint found_nonfinite[NUM_SIMDGROUPS];

  const uint3 group = whole_grid(params, position);
  const uint thread_index = simdgroup * 32 + lane;
  const int head = int(group.y);
  const int kv_head = head / params.num_groups;
  const int first_query = query_block(params, group.x, BLOCK_Q) * BLOCK_Q;
  const int first_row = first_query + int(simdgroup) * 8 * kRows;
  const int lane_row = first_row + fragment_row(lane);  // that of row fragment 0

  const Matrix<T> keys_matrix =
      key_matrix(params, key, params.key, group.z, kv_head, head_dim);
  const Matrix<T> values_matrix =
      key_matrix(params, value, params.value, group.z, kv_head, value_head_dim);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);

  RowFragments<T, HEAD_DIM, kRows, kKeepQuery> q;
  const Matrix<T> queries_matrix =
      query_matrix(params, query, params.query, group.z, head, head_dim);
  load_rows(q, rows_from(queries_matrix, first_row), lane);
  Tile<T, BLOCK_KV, BLOCK_D, LOADS> tile;
  tile.shared = shared;
  Fragment o[kRows * kDims];
  clear(o);
  SoftmaxRow softmax[kRows];
  Range keys[kRows];
  JFM_UNROLL for (int r = 0; r < kRows; ++r) {
    softmax[r] = empty_softmax_row();
    keys[r] = visible_keys(params, operands, lane_row + r * 8);
  }

  const Range block_keys = visible_keys_of_block(params, operands, first_query, BLOCK_Q);
  for (int first_key = block_keys.begin / BLOCK_KV * BLOCK_KV; first_key < block_keys.end;
       first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
      continue;
    }
    const bool is_interior =
        block_is_interior(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV);
    // S = Q Kᵀ. Not sanitised: scores must show a NaN.
    Fragment s[kRows * kKeys];
    clear(s);
    JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
      if (d < head_dim) {
        set_tile<kThreads>(tile, rows_from(keys_matrix, first_key), d, false, thread_index);
        multiply_transposed(s, q, tile, lane);
      }
    }

    JFM_UNROLL for (int r = 0; r < kRows; ++r) {
      const float correction = update_softmax<kKeys>(
          params, operands, softmax[r], s + r * kKeys, is_interior, keys[r], lane_row + r * 8,
          first_key, lane);
      JFM_UNROLL for (int d = 0; d < kDims; ++d) {
        o[r * kDims + d].thread_elements()[0] *= correction;
        o[r * kDims + d].thread_elements()[1] *= correction;
      }
    }

    // O += P V
    const Matrix<T> block_values = rows_from(values_matrix, first_key);
    bool found = false;
    JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
      if (d < value_head_dim) {
        const bool met = set_tile<kThreads>(tile, block_values, d, !is_interior, thread_index);
        found = found || met;
        if (LOADS == JFM_LOADS_DEVICE && !is_interior) {
          found = multiply_accumulate_finite<HEAD_DIM, kRows>(o, s, tile, d, lane) || found;
        } else {
          multiply_accumulate<HEAD_DIM, kRows>(o, s, tile, d, lane);
        }
      }
    }
    if (is_interior) continue;
    found = simd_any(found);
    if (LOADS == JFM_LOADS_THREADGROUP) {  // a simdgroup knows only of what it copied
      if (lane == 0) found_nonfinite[simdgroup] = found ? 1 : 0;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      JFM_UNROLL for (int i = 0; i < NUM_SIMDGROUPS; ++i) found = found || found_nonfinite[i] != 0;
    }
    // Rare: a row that sees such a value becomes NaN.
    if (found) {
      JFM_UNROLL for (int r = 0; r < kRows; ++r) {
        if (sees_nonfinite_value(
                params, operands, keys[r], lane_row + r * 8, first_key, BLOCK_KV,
                block_values)) {
          softmax[r].sum = quiet_nan();
        }
      }
    }
  }

  out += head_offset(params, params.out, group.z, head);
  logsumexp += head_offset(params, params.logsumexp, group.z, head);
  float sink = 0.0f;
  if (has_sinks) sink = sinks[head_offset(params, params.sinks, group.z, head)];
  float factors[kRows];
  JFM_UNROLL for (int r = 0; r < kRows; ++r) {
    softmax[r].sum = row_total<kDims>(softmax[r], o + r * kDims);
    const SoftmaxResult result = finish_softmax(softmax[r], sink);
    factors[r] = result.factor;
    const int row = lane_row + r * 8;
    if (row < params.q_len && fragment_col(lane) == 0) {
      logsumexp[row * params.logsumexp.row] = result.logsumexp;
    }
  }
  store_rows<HEAD_DIM, kRows>(
      o, factors, out, params.out.row, first_row, params.q_len, value_head_dim, lane);
}
