// The score gradient, shared by all backward kernels. No kernel here.
//   p = exp(x - lse) * factor;  ds = p ∘ (dropout(dp) - delta) ∘ dx/d(score before the softcap)
#pragma once

#include "attention_scores.h"

// What the backward needs of a query row.
struct RowStatistics {
  float logsumexp;  // in score units; NaN if the forward's is, or if delta is not finite
  float delta;
  float factor;  // 1 but for a coarse logsumexp, see attention_delta
};

METAL_FUNC RowStatistics load_row_statistics(
    constant AttentionParams& params, device const float* logsumexp, device const float* delta,
    int row) {
  RowStatistics statistics = {0.0f, 0.0f, 1.0f};
  if (aligned_q || row < params.q_len) {
    statistics.delta = delta[row * params.delta.row];
    statistics.factor = delta[row * params.delta.row + 1];
    const float lse = to_score_units(logsumexp[row * params.logsumexp.row]);
    statistics.logsumexp = is_finite_value(statistics.delta) ? lse : quiet_nan();
  }
  return statistics;
}

// exp(score - lse) of a visible element, lse in score units; `slope` as by score().
METAL_FUNC float exp_shifted_score(
    constant AttentionParams& params, thread const ScoreOperands& operands, int query, int key,
    float dot, float bias, float lse, thread float& slope) {
  slope = 1.0f;
  // fma: one rounding less where scores are in the hundreds.
  if (is_plain_score()) return exp2(fma(dot, params.scale_log2, -lse));
  return exp_score(score(params, operands, query, key, dot, bias, slope) - lse);
}

// The same of a sink, both in natural units.
METAL_FUNC float sink_weight(float sink, float lse) { return exp2((sink - lse) * JFM_LOG2E); }

// dropped(P) and dS of one element.
struct ScoreGradient {
  float p, ds;
};

// From the products dot = q·k and dp = dout·v; `word`: the dropout bits. Selected, not
// multiplied, by visibility: a hidden element is 0 even in a row that is NaN.
METAL_FUNC ScoreGradient score_gradient(
    constant AttentionParams& params, thread const ScoreOperands& operands, bool visible,
    int query, int key, float dot, float dp, float bias, uint word,
    thread const RowStatistics& row) {
  ScoreGradient gradient = {0.0f, 0.0f};
  if (!visible) return gradient;
  float slope;
  const float p = row.factor * exp_shifted_score(
      params, operands, query, key, dot, bias, row.logsumexp, slope);
  gradient.p = has_dropout ? dropped(params, word, p) : p;
  gradient.ds = p * ((has_dropout ? dropped(params, word, dp) : dp) - row.delta);
  if (has_softcap) gradient.ds *= slope;
  return gradient;
}

// dS in place of S, for one query per lane against a block of keys; 0 for a row that is not
// valid.
template <int N>
METAL_FUNC void score_gradients(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    thread Fragment (&s)[N], thread Fragment (&dp)[N], Range keys, int query, bool is_valid,
    int first_key, thread const RowStatistics& statistics, uint lane) {
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    const int col = first_key + j * 8 + fragment_col(lane);
    uint2 words = uint2(0, 0);
    if (has_dropout) words = dropout_words(operands, query, col);
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      float bias = 0.0f;
      const bool visible =
          is_valid && query_sees(params, operands, keys, query, col + e, bias);
      const ScoreGradient gradient = score_gradient(
          params, operands, visible, query, col + e, s[j].thread_elements()[e],
          dp[j].thread_elements()[e], bias, words[e], statistics);
      s[j].thread_elements()[e] = gradient.ds;
    }
  }
}

// dS of a simdgroup's 8 query rows and a block of keys. All threads of a threadgroup call it
// together; at the end the tile holds the block's K, without NaN and inf.
template <typename T, int HEAD_DIM, int BLOCK_KV, int NUM_THREADS, bool KEEP>
METAL_FUNC void score_gradients_of_rows(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    thread const RowFragments<T, HEAD_DIM, KEEP>& q,
    thread const RowFragments<T, HEAD_DIM, KEEP>& g, device const T* key, device const T* value,
    Range keys, int first_key, thread const RowStatistics& statistics, threadgroup T* tile,
    uint thread_index, thread Fragment (&ds)[BLOCK_KV / 8]) {
  const uint lane = thread_index % 32;
  // dP = dO Vᵀ
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last K tile is used up
  load_tile<T, BLOCK_KV, HEAD_DIM, NUM_THREADS, true>(
      tile, value, params.value.row, first_key, params.kv_len, value_head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Fragment dp[BLOCK_KV / 8];
  multiply_transposed(dp, g, tile, lane);

  // S = Q Kᵀ
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the V tile is used up
  load_tile<T, BLOCK_KV, HEAD_DIM, NUM_THREADS, true>(
      tile, key, params.key.row, first_key, params.kv_len, head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  multiply_transposed(ds, q, tile, lane);

  score_gradients(params, operands, ds, dp, keys, q.row, true, first_key, statistics, lane);
}
