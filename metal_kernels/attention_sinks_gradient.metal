// The gradient of sinks: -Σ exp(sink - logsumexp) · delta over the rows of every
// (batch, head) that shares a sink. A row that sees no key has no use for it: 0.
// The rows are dealt to the threads in turn and the threads' sums added in one order:
// deterministic.
//
// Grid: z = pair of those (batch, head) that the gradient walks; one threadgroup each.

#include "attention_backward.h"

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_sinks_gradient(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device const float* sinks [[buffer(JFM_BUFFER_SINKS)]],
    device float* gradient [[buffer(JFM_BUFFER_GRADIENT)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  threadgroup float sums[NUM_SIMDGROUPS];

  const BatchHead kept = nth_pair(params, params.gradient, true, group.z);
  float sum = 0.0f;
  for (int i = 0; i < params.num_summed; ++i) {
    const BatchHead summed = nth_pair(params, params.gradient, false, i);
    const uint batch = kept.batch + summed.batch;
    const int head = kept.head + summed.head;
    const float sink = sinks[head_offset(params, params.sinks, batch, head)];
    device const float* lse = logsumexp + head_offset(params, params.logsumexp, batch, head);
    device const float* dl = delta + head_offset(params, params.delta, batch, head);
    for (int row = int(simdgroup * 32 + lane); row < params.q_len; row += 32 * NUM_SIMDGROUPS) {
      const float row_lse = lse[row * params.logsumexp.row];
      if (is_minus_infinity(row_lse)) continue;
      const RowStatistics statistics = load_row_statistics(params, dl, row);
      const float x = to_score_units(sink) - statistics.shift - statistics.remainder;
      sum -= exp_score(x) * statistics.delta;
    }
  }

  sum = simd_sum(sum);
  if (lane == 0) sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane == 0) {
    float total = 0.0f;
    for (int i = 0; i < NUM_SIMDGROUPS; ++i) total += sums[i];
    gradient[head_offset(params, params.gradient, kept.batch, kept.head)] = total;
  }
}
