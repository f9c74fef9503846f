// What the backward needs of a query row, as four float32 (the last is 0); one simdgroup per
// row.
//   delta = rowsum(dout ∘ out) - dlogsumexp
//   shift + remainder = logsumexp, in score units: itself and 0; where it is too coarse for that,
//     the largest score and log Σ exp(x - largest score). The shift is NaN if delta is not finite
// delta is NaN if dout holds a NaN or inf: the backward kernels work on sanitised dout, and
// this is how they learn which rows are not finite.
//
// Grid: x = block of NUM_SIMDGROUPS rows, y = query head, z = batch index.

#include "attention_backward.h"

// float32 numbers beyond 4096 are 2^-11 = 5e-4 apart and more: rounding a logsumexp there is
// an error of 1e-4 and more of every probability. At 1e9 (a padding bias on all keys) nothing
// is left of log(sum). The scores are as coarse, but they are what the forward took: each is
// summed here in the order of a product's columns.
METAL_FUNC bool is_coarse(float logsumexp) {
  return is_finite_value(logsumexp) && abs(logsumexp) > 4096.0f;
}

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_delta(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const T* out [[buffer(JFM_BUFFER_OUT)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* dlogsumexp [[buffer(JFM_BUFFER_DLOGSUMEXP)]],
    device float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device const float* sinks [[buffer(JFM_BUFFER_SINKS), function_constant(has_sinks)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const int head = int(group.y);
  const int row = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (row >= params.q_len) return;  // whole simdgroups leave; no barrier follows
  out += head_offset(params, params.out, group.z, head) + row * params.out.row;
  dout += head_offset(params, params.dout, group.z, head) + row * params.dout.row;
  dlogsumexp += head_offset(params, params.dlogsumexp, group.z, head);
  delta += head_offset(params, params.delta, group.z, head);

  float sum = 0.0f;
  for (int c = int(lane); c < value_head_dim; c += 32) {
    const float g = float(dout[c]);
    sum += is_finite_value(g) ? g * float(out[c]) : quiet_nan();
  }
  sum = simd_sum(sum);

  const float row_lse =
      logsumexp[head_offset(params, params.logsumexp, group.z, head) + row * params.logsumexp.row];
  float shift = to_score_units(row_lse);
  float remainder = 0.0f;
  if (is_coarse(row_lse)) {  // the same for all lanes
    ScorePointers pointers;
    JFM_SCORE_POINTERS(pointers);
    const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);
    const Range keys = visible_keys(params, operands, row);
    query += head_offset(params, params.query, group.z, head) + row * params.query.row;
    key += head_offset(params, params.key, group.z, head / params.num_groups);
    float high = JFM_MOST_NEGATIVE;  // the largest score of this lane's
    float total = 0.0f;              // of exp(score - high)
    if (has_sinks && lane == 0) {
      const float sink = sinks[head_offset(params, params.sinks, group.z, head)];
      high = max(high, to_score_units(sink));
      total = exp_score(to_score_units(sink) - high);
    }
    for (int j = keys.begin + int(lane); j < keys.end; j += 32) {
      float bias, slope;
      if (!query_sees(params, operands, keys, row, j, bias)) continue;
      float dot = 0.0f;
      for (int i = 0; i < head_dim; ++i) {
        const int c = dealt_column(i, head_dim);
        dot = fma(float(query[c]), float(key[j * params.key.row + c]), dot);
      }
      const float x = score(params, operands, row, j, dot, bias, slope);
      const float new_high = max(high, x);
      total = total * exp_score(high - new_high) + exp_score(x - new_high);
      high = new_high;
    }
    shift = simd_max(high);
    remainder = log_score(simd_sum(total * exp_score(high - shift)));
  }

  if (lane == 0) {
    RowStatistics statistics;
    statistics.delta = sum - dlogsumexp[row * params.dlogsumexp.row];
    statistics.remainder = remainder;
    statistics.shift = is_finite_value(statistics.delta) ? shift : quiet_nan();
    store_row_statistics(delta, row, statistics);
  }
}
