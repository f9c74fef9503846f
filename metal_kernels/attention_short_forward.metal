// Forward attention for short queries: split over the keys, then combine.

#include "attention_short.h"
#include "attention_softmax.h"

// One simdgroup: 8 packed rows against one split of the keys. K and V go from device
// memory to registers, since no other simdgroup of the threadgroup reads the same keys.
// Writes out normalised within the split, and the maximum and sum of its softmax.
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_short_forward(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device float2* partial_softmax [[buffer(JFM_BUFFER_PARTIAL_SOFTMAX)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8, "a simdgroup owns 8 packed rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(BLOCK_KV <= 32, "block_is_hidden");
  const uint3 group = whole_grid(params, position);
  constexpr int kDimFragments = HEAD_DIM / 8;

  const int split = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (split >= params.num_splits) return;  // whole simdgroups leave; there are no barriers
  const int row_blocks = num_row_blocks(params);
  const int kv_head = int(group.y) / row_blocks;
  const PackedRow row =
      packed_row(params, kv_head, int(group.y) % row_blocks, fragment_row(lane), group.z);

  query += head_offset(params, params.query, group.z, row.head) + row.query * params.query.row;
  const Matrix<T> keys_matrix =
      key_matrix(params, key, params.key, group.z, kv_head, head_dim);
  const Matrix<T> values_matrix =
      key_matrix(params, value, params.value, group.z, kv_head, value_head_dim);

  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  // The rows of a simdgroup have different heads, but one batch index.
  const ScoreOperands operands = load_score_operands(params, pointers, group.z, row.head);

  const RowFragments<T, HEAD_DIM, 1, false> rows = packed_rows<HEAD_DIM>(query, head_dim);
  Fragment o[kDimFragments];
  clear(o);
  SoftmaxRow softmax = empty_softmax_row();

  const Range keys = visible_keys(params, operands, row.query);
  const int split_start = split * params.keys_per_split;
  const Range block_keys = visible_keys_of_block(params, operands, 0, params.q_len);
  const int end_key = min(split_start + params.keys_per_split, block_keys.end);
  for (int first_key = max(split_start, block_keys.begin / BLOCK_KV * BLOCK_KV);
       first_key < end_key; first_key += BLOCK_KV) {
    if (block_is_hidden(params, operands, 0, params.q_len, first_key, BLOCK_KV, lane)) continue;
    const Matrix<T> block_values = rows_from(values_matrix, first_key);
    const Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> key_tile =
        device_tile<HEAD_DIM, BLOCK_KV>(rows_from(keys_matrix, first_key));
    const Tile<T, BLOCK_KV, HEAD_DIM, JFM_LOADS_DEVICE> value_tile =
        device_tile<HEAD_DIM, BLOCK_KV>(block_values);
    Fragment s[BLOCK_KV / 8];
    clear(s);
    multiply_transposed(s, rows, key_tile, lane);
    const bool is_interior =
        block_is_interior(params, operands, 0, params.q_len, first_key, BLOCK_KV);
    const float correction = update_softmax<BLOCK_KV / 8>(
        params, operands, softmax, s, is_interior, keys, row.query, first_key, lane);
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      o[d].thread_elements()[0] *= correction;
      o[d].thread_elements()[1] *= correction;
    }
    bool found = false;
    if (is_interior) {
      multiply_accumulate<HEAD_DIM, 1>(o, s, value_tile, 0, lane);
    } else {
      found = multiply_accumulate_finite<HEAD_DIM, 1>(o, s, value_tile, 0, lane);
    }
    const bool found_any = simd_any(found);
    // Rare: a row that sees such a value becomes NaN.
    if (found_any &&
        sees_nonfinite_value(
            params, operands, keys, row.query, first_key, BLOCK_KV, block_values)) {
      softmax.sum = quiet_nan();
    }
  }

  softmax.sum = row_total<kDimFragments>(softmax, o);
  if (!row.valid) return;
  const float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;
  const long partial_index = split * num_partial_rows(params) + row.index;
  store_partial_row(o, inverse, partial + partial_index * value_head_dim, value_head_dim, lane);
  if (fragment_col(lane) == 0) partial_softmax[partial_index] = float2(softmax.max, softmax.sum);
}

// Merges the splits of one row per simdgroup: out = Σ_s w_s out_s / Σ_s w_s with
// w_s = sum_s · exp(max_s - max).
//
// Grid: x = block of NUM_SIMDGROUPS rows.
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_short_forward_combine(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device const float2* partial_softmax [[buffer(JFM_BUFFER_PARTIAL_SOFTMAX)]],
    device T* out [[buffer(JFM_BUFFER_OUT)]],
    device float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const float* sinks [[buffer(JFM_BUFFER_SINKS), function_constant(has_sinks)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const long num_rows = num_partial_rows(params);
  const long row = long(group.x) * NUM_SIMDGROUPS + simdgroup;
  if (row >= num_rows) return;

  SoftmaxRow softmax = empty_softmax_row();
  for (int s = 0; s < params.num_splits; ++s) {
    softmax.max = max(softmax.max, partial_softmax[s * num_rows + row].x);
  }
  for (int s = 0; s < params.num_splits; ++s) {
    const float2 part = partial_softmax[s * num_rows + row];
    softmax.sum += part.y * exp_score(part.x - softmax.max);
  }
  float sink = 0.0f;
  if (has_sinks) sink = sinks[partial_row_offset(params, params.sinks, row)];
  const SoftmaxResult result = finish_softmax(softmax, sink);

  device T* out_row = out + partial_row_offset(params, params.out, row);
  for (int c = int(lane); c < value_head_dim; c += 32) {
    float sum = 0.0f;
    for (int s = 0; s < params.num_splits; ++s) {
      const long index = s * num_rows + row;
      const float2 part = partial_softmax[index];
      const float weight = part.y * exp_score(part.x - softmax.max);
      sum += weight * partial[index * value_head_dim + c];
    }
    out_row[c] = T(sum * result.factor);
  }
  if (lane == 0) logsumexp[partial_row_offset(params, params.logsumexp, row)] = result.logsumexp;
}
