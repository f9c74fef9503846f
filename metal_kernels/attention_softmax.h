// The online softmax of a row, shared by the tiled and the short forward kernels. No
// kernel here.
#pragma once

#include "attention_scores.h"

// A row over the keys so far. The maximum starts at a finite number (JFM_MOST_NEGATIVE).
struct SoftmaxRow {
  float max;     // in score units
  float sum;     // of exp(score - max), this lane's part of it
  float lowest;  // of the scores in interior blocks that this lane has
};

METAL_FUNC SoftmaxRow empty_softmax_row() {
  SoftmaxRow row = {JFM_MOST_NEGATIVE, 0.0f, INFINITY};
  return row;
}

// Goes on to a block whose largest score, of this lane's, is `block_max`. Returns the factor of
// what was accumulated before.
METAL_FUNC float raise_max(thread SoftmaxRow& row, float block_max) {
  const float new_max = max(row.max, row_max(block_max));
  const float correction = exp_score(row.max - new_max);
  row.max = new_max;
  row.sum *= correction;
  return correction;
}

// Turns products q·k of a row and a block of keys into (dropped) probabilities, unnormalised.
// Returns the factor of what was accumulated before. The sum is of undropped ones. In an
// interior block nothing is hidden; elsewhere a visible score of -inf (of an infinite operand,
// or an overflow) would look like a hidden one: NaN, which the logsumexp takes to the backward.
//
// Where only q·k enters a score, s stays q·k up to the exponential: the scale, of either sign, is
// applied to the extremes for the maximum. All blocks round alike: a mask that hides nothing
// changes no bit. The score is rounded before the maximum is taken off, as the maximum was: one
// key gives its value exactly.
template <int N>
METAL_FUNC float update_softmax(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    thread SoftmaxRow& row, thread Fragment* s, bool is_interior, Range keys, int query,
    int first_key, uint lane) {
  const int col = first_key + fragment_col(lane);
  const float hidden = is_plain_score() && params.scale_log2 < 0.0f ? INFINITY : -INFINITY;
  float high = -INFINITY, low = INFINITY;
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      const int key = col + j * 8 + e;
      float x = s[j].thread_elements()[e];
      float bias = 0.0f;
      float slope;
      const bool visible = is_interior || query_sees(params, operands, keys, query, key, bias);
      if (!is_plain_score()) x = score(params, operands, query, key, x, bias, slope);
      if (!is_interior) {
        const float y = is_plain_score() ? rounded_product(x, params.scale_log2) : x;
        x = !visible ? hidden : y > -INFINITY ? x : quiet_nan();
      }
      s[j].thread_elements()[e] = x;
      high = max(high, x);
      if (is_interior || is_plain_score()) low = min(low, x);
    }
  }
  if (is_plain_score()) {
    const float a = rounded_product(high, params.scale_log2);
    const float b = rounded_product(low, params.scale_log2);
    high = max(a, b);
    low = min(a, b);
  }
  if (is_interior) row.lowest = min(row.lowest, low);
  const float correction = raise_max(row, high);
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    uint2 words = uint2(0, 0);
    if (has_dropout) words = dropout_words(operands, query, col + j * 8);
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      const float x = s[j].thread_elements()[e];
      const float y = is_plain_score() ? rounded_product(x, params.scale_log2) : x;
      float difference = y - row.max;
      if (!is_interior && x == hidden) difference = -INFINITY;  // 0 times inf would be NaN
      const float p = exp_score(difference);
      row.sum += p;
      s[j].thread_elements()[e] = has_dropout ? dropped(params, words[e], p) : p;
    }
  }
  return correction;
}

// Whether the query sees a value that is not finite among num_keys keys, whose values are the
// first rows of the matrix.
template <typename T>
METAL_FUNC bool sees_nonfinite_value(
    constant AttentionParams& params, thread const ScoreOperands& operands, Range keys, int query,
    int first_key, int num_keys, Matrix<T> value) {
  for (int key = first_key; key < min(first_key + num_keys, params.kv_len); ++key) {
    float bias;
    if (query_sees(params, operands, keys, query, key, bias) &&
        !row_is_finite(matrix_row(value, key - first_key), value_head_dim)) {
      return true;
    }
  }
  return false;
}

// The sum of a row over all its lanes, at the end. NaN where an interior block, in which nothing
// is looked at one by one, had a score of -inf (which is no hidden key) or a value that was not
// finite: then the row is NaN in both passes, and not in some of its columns.
template <int N>
METAL_FUNC float row_total(SoftmaxRow row, thread Fragment* o) {
  bool is_spoilt = is_minus_infinity(row.lowest);
  JFM_UNROLL for (int d = 0; d < N; ++d) {
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      is_spoilt = !is_finite_value(o[d].thread_elements()[e]) || is_spoilt;
    }
  }
  return row_sum(is_spoilt ? quiet_nan() : row.sum);
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
