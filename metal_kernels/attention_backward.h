// The score gradient, shared by the dQ and dK/dV kernels. No kernel here.
#pragma once

#include "attention_common.h"

// What the backward needs of a query row.
struct RowStatistics {
  float logsumexp_log2;  // NaN if anything the row sees, or its cotangent, is not finite
  float delta;
};

METAL_FUNC RowStatistics load_row_statistics(
    constant AttentionParams& params, device const float* logsumexp, device const float* delta,
    int row) {
  RowStatistics statistics;
  statistics.logsumexp_log2 = 0.0f;
  statistics.delta = 0.0f;
  if (aligned_q || row < params.q_len) {
    statistics.delta = delta[row * params.delta.row];
    const float lse = logsumexp[row * params.logsumexp.row] * JFM_LOG2E;
    statistics.logsumexp_log2 = isnan(statistics.delta) ? statistics.delta : lse;
  }
  return statistics;
}

METAL_FUNC bool is_visible_pair(constant AttentionParams& params, int query_index, int key_index) {
  return (aligned_q || query_index < params.q_len) && is_visible(params, query_index, key_index);
}

// P and dS of one element from its score S and dP = dO·Vᵀ. Selected, not multiplied, by
// visibility: a hidden element is 0 even in a row that is NaN.
METAL_FUNC void score_gradient(
    constant AttentionParams& params, bool visible, float score, float dp,
    thread const RowStatistics& row, thread float& p, thread float& ds) {
  // fma: one rounding less where scores are in the hundreds.
  p = visible ? exp2(fma(score, params.scale_log2, -row.logsumexp_log2)) : 0.0f;
  ds = visible ? p * (dp - row.delta) : 0.0f;
}
