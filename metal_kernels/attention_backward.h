// The score gradient, and how it lies in scratch; shared by all backward kernels. No kernel
// here.
//   p = exp(x - shift - remainder);  ds = p ∘ (dropout(dp) - delta) ∘ dx/d(score before the softcap)
#pragma once

#include "attention_scores.h"

// What the backward needs of a query row, as attention_delta writes it: one load.
struct RowStatistics {
  float delta;
  // The logsumexp is their sum, in score units: the whole and 0, or where that would be too
  // coarse, the largest score and what is left.
  float remainder;
  float shift;  // NaN if the logsumexp is, or if delta is not finite
};

METAL_FUNC RowStatistics load_row_statistics(
    constant AttentionParams& params, device const float* delta, int row) {
  RowStatistics statistics = {0.0f, 0.0f, 0.0f};
  if (aligned_q || row < params.q_len) {
    const float4 x = ((device const float4*)delta)[row];
    statistics.delta = x.x;
    statistics.remainder = x.y;
    statistics.shift = x.z;
  }
  return statistics;
}

METAL_FUNC void store_row_statistics(
    device float* delta, int row, thread const RowStatistics& statistics) {
  ((device float4*)delta)[row] =
      float4(statistics.delta, statistics.remainder, statistics.shift, 0.0f);
}

// P of one element, not dropped, and the derivative of its score.
struct ScoreWeight {
  float p, slope;
};

// From the product dot = q·k. Selected, not multiplied, by visibility: a hidden element is 0
// even in a row that is NaN.
METAL_FUNC ScoreWeight score_weight(
    constant AttentionParams& params, thread const ScoreOperands& operands, bool visible,
    int query, int key, float dot, float bias, thread const RowStatistics& row) {
  ScoreWeight weight = {0.0f, 1.0f};
  if (!visible) return weight;
  const float x = score(params, operands, query, key, dot, bias, weight.slope) - row.shift -
                  row.remainder;
  // A weight is at most 1. Where a score and the shift were summed in different orders, x may be
  // some units of the last digit above 0: hundreds, of scores in the billions. NaN stays.
  weight.p = exp_score(x > 0.0f ? 0.0f : x);
  return weight;
}

// dS of one element, from dp = dout·v; `word`: the dropout bits.
METAL_FUNC float weighted_score_gradient(
    constant AttentionParams& params, bool visible, ScoreWeight weight, float dp, uint word,
    thread const RowStatistics& row) {
  if (!visible) return 0.0f;
  const float ds = weight.p * ((has_dropout ? dropped(params, word, dp) : dp) - row.delta);
  return has_softcap ? ds * weight.slope : ds;
}

// dS in place of S, for one query per lane against a block of keys; 0 for a row that is not
// valid.
template <int N>
METAL_FUNC void score_gradients(
    constant AttentionParams& params, thread const ScoreOperands& operands, thread Fragment* s,
    thread Fragment* dp, bool is_interior, Range keys, int query, bool is_valid, int first_key,
    thread const RowStatistics& statistics, uint lane) {
  JFM_UNROLL for (int j = 0; j < N; ++j) {
    const int col = first_key + j * 8 + fragment_col(lane);
    uint2 words = uint2(0, 0);
    if (has_dropout) words = dropout_words(operands, query, col);
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      float bias = 0.0f;
      const bool visible =
          is_valid &&
          (is_interior || query_sees(params, operands, keys, query, col + e, bias));
      const ScoreWeight weight = score_weight(
          params, operands, visible, query, col + e, s[j].thread_elements()[e], bias, statistics);
      s[j].thread_elements()[e] = weighted_score_gradient(
          params, visible, weight, dp[j].thread_elements()[e], words[e], statistics);
    }
  }
}

// What a simdgroup that owns query rows knows of one (batch, head).
template <typename T, int HEAD_DIM, int ROW_FRAGMENTS, bool KEEP>
struct QueryRows {
  RowFragments<T, HEAD_DIM, ROW_FRAGMENTS, KEEP> query, dout;
  Matrix<T> key, value;
  int first_row;
  Range keys[ROW_FRAGMENTS];  // of this lane's row in each fragment
  RowStatistics statistics[ROW_FRAGMENTS];
};

// The rows from first_row on.
template <typename T, int HEAD_DIM, int R, bool KEEP>
METAL_FUNC void load_query_rows(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    device const T* query, device const T* key, device const T* value, device const T* dout,
    device const float* delta, uint batch, int head, int first_row, uint lane,
    thread QueryRows<T, HEAD_DIM, R, KEEP>& rows) {
  const int kv_head = head / params.num_groups;
  const Matrix<T> q = query_matrix(params, query, params.query, batch, head, head_dim);
  const Matrix<T> go = query_matrix(params, dout, params.dout, batch, head, value_head_dim);
  load_rows(rows.query, rows_from(q, first_row), lane);
  load_rows(rows.dout, rows_from(go, first_row), lane);
  rows.first_row = first_row;
  rows.key = key_matrix(params, key, params.key, batch, kv_head, head_dim);
  rows.value = key_matrix(params, value, params.value, batch, kv_head, value_head_dim);
  delta += head_offset(params, params.delta, batch, head);
  JFM_UNROLL for (int r = 0; r < R; ++r) {
    const int row = first_row + r * 8 + fragment_row(lane);
    rows.keys[r] = visible_keys(params, operands, row);
    rows.statistics[r] = load_row_statistics(params, delta, row);
  }
}

// dS of a simdgroup's rows and a block of keys. All threads of a threadgroup call it together.
// Where the columns are not blocked, the tile holds K at the end, as if set with `sanitizes`.
template <int NUM_THREADS, typename T, int HEAD_DIM, int R, bool KEEP, int ROWS, int BLOCK_D,
          int LOADS>
METAL_FUNC void score_gradients_of_rows(
    constant AttentionParams& params, thread const ScoreOperands& operands,
    thread const QueryRows<T, HEAD_DIM, R, KEEP>& rows, bool is_interior, bool sanitizes,
    int first_key, thread Tile<T, ROWS, BLOCK_D, LOADS>& tile, uint thread_index,
    thread Fragment (&ds)[R * ROWS / 8]) {
  const uint lane = thread_index % 32;
  Fragment dp[R * ROWS / 8];  // dP = dO Vᵀ
  clear(dp);
  JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
    if (d < value_head_dim) {
      set_tile<NUM_THREADS>(tile, rows_from(rows.value, first_key), d, false, thread_index);
      multiply_transposed(dp, rows.dout, tile, lane);
    }
  }
  clear(ds);  // S = Q Kᵀ
  JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
    if (d < head_dim) {
      set_tile<NUM_THREADS>(
          tile, rows_from(rows.key, first_key), d, sanitizes && BLOCK_D == HEAD_DIM,
          thread_index);
      multiply_transposed(ds, rows.query, tile, lane);
    }
  }
  JFM_UNROLL for (int r = 0; r < R; ++r) {
    score_gradients<ROWS / 8>(
        params, operands, ds + r * (ROWS / 8), dp + r * (ROWS / 8), is_interior, rows.keys[r],
        rows.first_row + r * 8 + fragment_row(lane), true, first_key, rows.statistics[r],
        lane);
  }
}

// ---------------------------------------------------------------- dS in scratch

// In the dtype of the operands, but for float16, whose exponent has too few bits: a mean over
// many tokens, small values or many keys make dS of 1e-9, a scaled loss of 1e6.
template <typename T>
struct ScoreGradient {
  typedef T type;
};
template <>
struct ScoreGradient<half> {
  typedef float type;
};

// The element of the 8 x 8 block that queries from 8 q and keys from key on have in common.
METAL_FUNC long score_gradient_block(
    constant AttentionParams& params, long pair, int q, int key) {
  const long row = pair * params.num_query_fragments + q;
  return (row * params.num_key_fragments + (key - params.first_chunk_key) / 8) * 64;
}

// Writes a block of dSᵀ; a lane's two elements lie side by side, a simdgroup's 64 in one piece.
template <typename T>
METAL_FUNC void store_score_gradient(
    constant AttentionParams& params, float2 ds, device T* score_gradient, long pair, int q,
    int key, uint lane) {
  device T* p = score_gradient + score_gradient_block(params, pair, q, key) +
                fragment_row(lane) * 8 + fragment_col(lane);
  p[0] = T(ds.x);
  p[1] = T(ds.y);
}

// The block as left operand of dQ = dS K: transposed.
template <typename T>
METAL_FUNC OperandFragment<T> load_score_gradient(
    constant AttentionParams& params, device const T* score_gradient, long pair, int q, int key,
    uint lane) {
  device const T* p = score_gradient + score_gradient_block(params, pair, q, key);
  OperandFragment<T> ds;
  ds.thread_elements()[0] = p[fragment_col(lane) * 8 + fragment_row(lane)];
  ds.thread_elements()[1] = p[(fragment_col(lane) + 1) * 8 + fragment_row(lane)];
  return ds;
}

// ---------------------------------------------------------------- parts of dK and dV

// Number of the head in the partial results [part, batch, kv head, key, column].
METAL_FUNC long partial_key_head(
    constant AttentionParams& params, long part, long batch, int kv_head) {
  long num_batches = 1;
  for (int i = 0; i < params.num_batch_dims; ++i) num_batches *= params.batch_sizes[i];
  return (part * num_batches + batch) * params.num_kv_heads + kv_head;
}
