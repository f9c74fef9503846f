// The online softmax of a row, shared by the tiled and the short forward kernels. No
// kernel here.
#pragma once

#include "attention_scores.h"

// A row over the keys so far. The maximum starts at a finite number (JFM_MOST_NEGATIVE).
struct SoftmaxRow {
  float max;  // in score units
  float sum;  // of exp(score - max), this lane's part of it
};

METAL_FUNC SoftmaxRow empty_softmax_row() {
  SoftmaxRow row = {JFM_MOST_NEGATIVE, 0.0f};
  return row;
}

// Turns products q·k of a block of keys into (dropped) probabilities, unnormalised. Returns
// the factor of what was accumulated before. The sum is of undropped ones.
template <int N>
METAL_FUNC float update_softmax(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    thread SoftmaxRow& row, thread Fragment (&s)[N], Range keys, int query, int first_key,
    uint lane) {
  const int col = first_key + fragment_col(lane);
  float block_max = -INFINITY;
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      const int key = col + j * 8 + e;
      const float dot = s[j].thread_elements()[e];
      float bias, slope;
      const bool visible = query_sees(params, operands, keys, query, key, bias);
      const float x =
          visible ? shown(score(params, operands, query, key, dot, bias, slope)) : -INFINITY;
      s[j].thread_elements()[e] = x;
      block_max = max(block_max, x);
    }
  }
  const float new_max = max(row.max, row_max(block_max));
  const float correction = exp_score(row.max - new_max);
  row.max = new_max;
  row.sum *= correction;
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    uint2 words = uint2(0, 0);
    if (has_dropout) words = dropout_words(operands, query, col + j * 8);
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      const float p = exp_score(s[j].thread_elements()[e] - new_max);
      row.sum += p;
      s[j].thread_elements()[e] = has_dropout ? dropped(params, words[e], p) : p;
    }
  }
  return correction;
}

// Whether the query sees a value that is not finite among num_keys keys.
template <typename T>
METAL_FUNC bool sees_nonfinite_value(
    constant AttentionParams& params, thread const ScoreOperands& operands, Range keys, int query,
    int first_key, int num_keys, device const T* value) {
  for (int key = first_key; key < min(first_key + num_keys, params.kv_len); ++key) {
    float bias;
    if (query_sees(params, operands, keys, query, key, bias) &&
        !row_is_finite(value + key * params.value.row, value_head_dim)) {
      return true;
    }
  }
  return false;
}

// What is left to do at the end of a row, whose sum is that of all lanes.
struct SoftmaxResult {
  float factor;  // of the accumulated products
  float logsumexp;
};

// `sink` is one more score, which has no value; a row without keys has no use for it.
METAL_FUNC SoftmaxResult finish_softmax(SoftmaxRow row, float sink) {
  SoftmaxResult result = {0.0f, -INFINITY};
  if (row.sum == 0.0f) return result;
  float correction = 1.0f;
  if (has_sinks) {
    const float x = to_score_units(sink);
    const float new_max = max(row.max, x);
    correction = exp_score(row.max - new_max);
    row.max = new_max;
    row.sum = row.sum * correction + exp_score(x - new_max);
  }
  result.factor = correction / row.sum;
  result.logsumexp = from_score_units(row.max + log_score(row.sum));
  return result;
}
