// dK and dV of one block of keys per threadgroup; no atomics, each simdgroup owns 8 or 16 keys.
//   for each query head of the group, for each block of queries that sees the block:
//     Sᵀ = K Qᵀ;  dPᵀ = V dOᵀ;  Pᵀ and dSᵀ from them (attention_backward.h)
//     dV += dropout(Pᵀ) dO;  dK += dSᵀ Q
//   dK *= scale
// With two roles, for a head_dim of which dK and dV do not fit in the registers of one
// simdgroup, pairs of simdgroups own the same keys: the first computes S, P and dV, the
// second dP, dS and dK, from the P that the first hands over in threadgroup memory.
//
// Where there is memory for it (writes_score_gradient), dS is written down, and
// attention_backward_dq_product makes dQ of it. Where few keys and heads would leave the GPU
// idle (writes_partials), the queries and heads that a block of keys sums over are cut into
// parts, whose sums attention_backward_dkv_combine adds up. All sums are in a fixed order:
// deterministic.
//
// Grid: x = key block, y = key/value head * parts + part, z = batch index.

#include "attention_backward.h"

// How a pair of simdgroups says that an element is hidden: no weight is negative.
#define JFM_HIDDEN_WEIGHT -1.0f

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_backward_dkv(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device T* dkey [[buffer(JFM_BUFFER_DKEY)]],
    device T* dvalue [[buffer(JFM_BUFFER_DVALUE)]],
    device typename ScoreGradient<T>::type* score_gradient
        [[buffer(JFM_BUFFER_SCORE_GRADIENT), function_constant(writes_score_gradient)]],
    device float* partial_dkey [[buffer(JFM_BUFFER_PARTIAL), function_constant(writes_partials)]],
    device float* partial_dvalue
        [[buffer(JFM_BUFFER_PARTIAL_DVALUE), function_constant(writes_partials)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kPairs = NUM_SIMDGROUPS / ROLES;  // or simdgroups, where there is one role
  static_assert(NUM_SIMDGROUPS % ROLES == 0 && ROLES <= 2, "simdgroups share rows in pairs");
  static_assert(BLOCK_KV % (8 * kPairs) == 0, "a simdgroup owns whole fragments");
  static_assert(BLOCK_Q % 8 == 0 && BLOCK_D % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(HEAD_DIM % BLOCK_D == 0, "tiles cut the columns");
  constexpr int kRows = BLOCK_KV / (8 * kPairs);  // fragments
  constexpr int kQueries = BLOCK_Q / 8;
  constexpr int kDims = HEAD_DIM / 8;
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;
  constexpr bool kPaired = ROLES == 2;
  constexpr int kSums = kPaired ? 1 : 2;  // of dK and dV, in one simdgroup
  constexpr bool kKeepRows = keeps_rows<T, HEAD_DIM, kRows>(
      kSums, 2 * kRows * kSums * (kDims + kQueries));
  constexpr int kWeights = kPaired ? 8 * kRows * BLOCK_Q : 1;  // of one pair
  // Two in turn where no tile's barrier keeps the first simdgroup of a pair from being a block
  // ahead of the second.
  constexpr int kTurns = kPaired && LOADS == JFM_LOADS_DEVICE ? 2 : 1;

  threadgroup T shared_query[tile_size<T, BLOCK_Q, BLOCK_D, LOADS>()];
  threadgroup T shared_dout[tile_size<T, BLOCK_Q, BLOCK_D, LOADS>()];
  threadgroup float shared_weights[kTurns * kPairs * kWeights];

  const uint3 group = whole_grid(params, position);
  const uint thread_index = simdgroup * 32 + lane;
  const int kv_head = int(group.y) / params.num_parts;
  const int part = int(group.y) % params.num_parts;
  const int first_key = int(group.x) * BLOCK_KV;
  const int first_row = first_key + int(simdgroup) / ROLES * 8 * kRows;  // rows are keys here
  const int lane_row = first_row + fragment_row(lane);
  const bool is_second = kPaired && simdgroup % 2 == 1;
  threadgroup float* weights = shared_weights + int(simdgroup) / ROLES * kTurns * kWeights;
  int turn = 0;

  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);
  const Matrix<T> keys_matrix =
      key_matrix(params, key, params.key, group.z, kv_head, head_dim);
  const Matrix<T> values_matrix =
      key_matrix(params, value, params.value, group.z, kv_head, value_head_dim);
  // Of a pair's second simdgroup: k is V, s is dPᵀ and then dSᵀ, dv is dK. v, dp and dk are
  // those of the one role; pairs leave them alone, so that they take no registers.
  RowFragments<T, HEAD_DIM, kRows, kKeepRows> k;
  RowFragments<T, HEAD_DIM, kRows, kKeepRows> v;
  load_rows(k, rows_from(is_second ? values_matrix : keys_matrix, first_row), lane);
  if (!kPaired) load_rows(v, rows_from(values_matrix, first_row), lane);
  Fragment dk[kRows * kDims];
  Fragment dv[kRows * kDims];
  clear(dk);
  clear(dv);

  const int num_blocks = (params.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const long first_item = long(part) * params.blocks_per_part;
  const long end_item =
      min(first_item + params.blocks_per_part, long(num_blocks) * params.num_groups);
  for (long item = first_item; item < end_item;) {
    const int g = int(item / num_blocks);
    const int first_block = int(item % num_blocks);
    const int end_block = int(min(long(num_blocks), first_block + (end_item - item)));
    item += end_block - first_block;
    const int head = kv_head * params.num_groups + g;
    const ScoreOperands operands = load_score_operands(params, pointers, group.z, head);
    const Matrix<T> q = query_matrix(params, query, params.query, group.z, head, head_dim);
    const Matrix<T> go = query_matrix(params, dout, params.dout, group.z, head, value_head_dim);
    device const float* head_delta = delta + head_offset(params, params.delta, group.z, head);
    const long pair = long(group.z) * params.num_heads + head - params.first_pair;

    Range queries[kRows];
    JFM_UNROLL for (int r = 0; r < kRows; ++r) {
      queries[r] = visible_queries(params, operands, lane_row + r * 8);
    }
    const Range block_queries = visible_queries_of_block(params, operands, first_key, BLOCK_KV);
    const int end_query = min(end_block * BLOCK_Q, block_queries.end);
    for (int first_query = max(first_block, block_queries.begin / BLOCK_Q) * BLOCK_Q;
         first_query < end_query; first_query += BLOCK_Q) {
      if (block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
        continue;
      }
      const bool is_interior =
          block_is_interior(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV);
      // Tiles: those of S = K Qᵀ and dV += Pᵀ dO, or of dP = V dOᵀ and dK += dSᵀ Q.
      Tile<T, BLOCK_Q, BLOCK_D, LOADS> q_tile = {shared_query, rows_from(q, first_query), 0};
      Tile<T, BLOCK_Q, BLOCK_D, LOADS> go_tile = {shared_dout, rows_from(go, first_query), 0};
      Fragment s[kRows * kQueries];
      Fragment dp[kRows * kQueries];
      clear(s);
      clear(dp);
      JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
        if (d < head_dim || d < value_head_dim) {
          // Where the columns are not blocked, the tiles serve all four products.
          set_tiles<kThreads>(
              q_tile, go_tile, d, !is_interior && BLOCK_D == HEAD_DIM, thread_index);
          multiply_transposed(s, k, is_second ? go_tile : q_tile, lane);
          if (!kPaired) multiply_transposed(dp, v, go_tile, lane);
        }
      }

      // Pᵀ in s, dSᵀ in dp; in a pair, P in its first simdgroup, dSᵀ in its second
      if (kTurns == 2) turn = 1 - turn;
      threadgroup float* turn_weights = weights + turn * kWeights;
      if (!is_second) {
        JFM_UNROLL for (int i = 0; i < kQueries; ++i) {
          const int col = i * 8 + fragment_col(lane);
          RowStatistics statistics[2];
          JFM_UNROLL for (int e = 0; e < 2; ++e) {
            statistics[e] = load_row_statistics(params, head_delta, first_query + col + e);
          }
          JFM_UNROLL for (int r = 0; r < kRows; ++r) {
            const int f = r * kQueries + i;
            const int row = lane_row + r * 8;
            float2 ds_pair = float2(0.0f, 0.0f);
            JFM_UNROLL for (int e = 0; e < 2; ++e) {
              const int query_index = first_query + col + e;
              float bias = 0.0f;
              const bool visible =
                  is_interior ||
                  key_is_seen(params, operands, queries[r], query_index, row, bias);
              const uint word = dropout_word(operands, query_index, row);
              const ScoreWeight weight = score_weight(
                  params, operands, visible, query_index, row, s[f].thread_elements()[e], bias,
                  statistics[e]);
              s[f].thread_elements()[e] = has_dropout ? dropped(params, word, weight.p) : weight.p;
              if (kPaired) {
                turn_weights[(r * 8 + fragment_row(lane)) * BLOCK_Q + col + e] =
                    visible ? weight.p * weight.slope : JFM_HIDDEN_WEIGHT;
              } else {
                const float ds = weighted_score_gradient(
                    params, visible, weight, dp[f].thread_elements()[e], word, statistics[e]);
                dp[f].thread_elements()[e] = ds;
                ds_pair[e] = ds;
              }
            }
            if (writes_score_gradient && !kPaired && first_query + i * 8 < params.q_len &&
                first_row + r * 8 < params.kv_len) {
              store_score_gradient(
                  params, ds_pair, score_gradient, pair, first_query / 8 + i,
                  first_row + r * 8, lane);
            }
          }
        }
      }
      if (kPaired) threadgroup_barrier(mem_flags::mem_threadgroup);
      if (is_second) {
        JFM_UNROLL for (int i = 0; i < kQueries; ++i) {
          const int col = i * 8 + fragment_col(lane);
          RowStatistics statistics[2];
          JFM_UNROLL for (int e = 0; e < 2; ++e) {
            statistics[e] = load_row_statistics(params, head_delta, first_query + col + e);
          }
          JFM_UNROLL for (int r = 0; r < kRows; ++r) {
            thread Fragment& ds = s[r * kQueries + i];
            float2 ds_pair = float2(0.0f, 0.0f);
            JFM_UNROLL for (int e = 0; e < 2; ++e) {
              const float x = turn_weights[(r * 8 + fragment_row(lane)) * BLOCK_Q + col + e];
              const ScoreWeight weight = {x, 1.0f};
              const float y = weighted_score_gradient(
                  params, !(x < 0.0f), weight, ds.thread_elements()[e],
                  dropout_word(operands, first_query + col + e, lane_row + r * 8),
                  statistics[e]);
              ds.thread_elements()[e] = y;
              ds_pair[e] = y;
            }
            if (writes_score_gradient && first_query + i * 8 < params.q_len &&
                first_row + r * 8 < params.kv_len) {
              store_score_gradient(
                  params, ds_pair, score_gradient, pair, first_query / 8 + i,
                  first_row + r * 8, lane);
            }
          }
        }
      }

      // dV += Pᵀ dO, dK += dSᵀ Q
      JFM_UNROLL for (int d = 0; d < HEAD_DIM; d += BLOCK_D) {
        if (d < head_dim || d < value_head_dim) {
          if (BLOCK_D != HEAD_DIM) {
            set_tiles<kThreads>(q_tile, go_tile, d, !is_interior, thread_index);
          }
          if (LOADS == JFM_LOADS_DEVICE && !is_interior) {
            multiply_accumulate_finite<HEAD_DIM, kRows>(
                dv, s, is_second ? q_tile : go_tile, d, lane);
            if (!kPaired) multiply_accumulate_finite<HEAD_DIM, kRows>(dk, dp, q_tile, d, lane);
          } else {
            multiply_accumulate<HEAD_DIM, kRows>(
                dv, s, is_second ? q_tile : go_tile, d, lane);
            if (!kPaired) multiply_accumulate<HEAD_DIM, kRows>(dk, dp, q_tile, d, lane);
          }
        }
      }
    }
  }

  const bool has_dvalue = !is_second;
  const bool has_dkey = !kPaired || is_second;
  if (writes_partials) {
    const long index = partial_key_head(params, part, group.z, kv_head) * params.kv_len;
    if (has_dvalue) {
      store_all_rows<HEAD_DIM, kRows>(
          dv, 1.0f, partial_dvalue + index * value_head_dim, value_head_dim, first_row,
          params.kv_len, value_head_dim, lane);
    }
    if (has_dkey) {
      store_all_rows<HEAD_DIM, kRows>(
          kPaired ? dv : dk, 1.0f, partial_dkey + index * head_dim, head_dim, first_row,
          params.kv_len, head_dim, lane);
    }
    return;
  }
  if (has_dvalue) {
    store_all_rows<HEAD_DIM, kRows>(
        dv, 1.0f, dvalue + head_offset(params, params.dvalue, group.z, kv_head),
        params.dvalue.row, first_row, params.kv_len, value_head_dim, lane);
  }
  if (has_dkey) {
    store_all_rows<HEAD_DIM, kRows>(
        kPaired ? dv : dk, params.scale,
        dkey + head_offset(params, params.dkey, group.z, kv_head), params.dkey.row, first_row,
        params.kv_len, head_dim, lane);
  }
}

// The sum of the parts, in their order; a thread per element.
//
// Grid: x = block of 32 · NUM_SIMDGROUPS elements [batch, kv head, key, column], y = 0: dK, 1: dV.
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_backward_dkv_combine(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* partial_dkey [[buffer(JFM_BUFFER_PARTIAL)]],
    device const float* partial_dvalue [[buffer(JFM_BUFFER_PARTIAL_DVALUE)]],
    device T* dkey [[buffer(JFM_BUFFER_DKEY)]],
    device T* dvalue [[buffer(JFM_BUFFER_DVALUE)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const bool is_dvalue = group.y == 1;
  const int num_cols = is_dvalue ? value_head_dim : head_dim;
  const long num_elements = partial_key_head(params, 1, 0, 0) * params.kv_len * num_cols;
  const long element = (long(group.x) * NUM_SIMDGROUPS + simdgroup) * 32 + lane;
  if (element >= num_elements) return;
  device const float* partial = is_dvalue ? partial_dvalue : partial_dkey;
  float sum = 0.0f;
  for (int p = 0; p < params.num_parts; ++p) sum += partial[p * num_elements + element];

  const int col = int(element % num_cols);
  const int row = int(element / num_cols % params.kv_len);
  const long index = element / num_cols / params.kv_len;
  const int kv_head = int(index % params.num_kv_heads);
  const uint batch = uint(index / params.num_kv_heads);
  if (is_dvalue) {
    dvalue[head_offset(params, params.dvalue, batch, kv_head) + row * params.dvalue.row + col] =
        T(sum);
  } else {
    dkey[head_offset(params, params.dkey, batch, kv_head) + row * params.dkey.row + col] =
        T(sum * params.scale);
  }
}
