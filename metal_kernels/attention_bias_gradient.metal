// The gradient of a bias, or of ALiBi's slopes: dS summed over all that shares an element.
//   for each block of scores that is summed into the tile, of this part:
//     dS as in attention_backward_dq;  sum += dS, or -dS ∘ distance for slopes
//   rows and columns of the tile summed, if they share an element
// Nothing of the size of the scores is stored but the gradient itself. The sum is in float32
// and in a fixed order, cut into parts where one tile would be too much for a threadgroup:
// deterministic.
//
// Grid: x = row tile * column tiles + column tile (one tile along an axis that is summed),
//       y = part, z = pair of those (batch, head) that the gradient walks ("kept").

#include "attention_backward.h"

// Element `index` of a gradient in its dtype.
METAL_FUNC void store_gradient(device uchar* gradient, long index, float x) {
  if (gradient_dtype == JFM_DTYPE_FLOAT32) {
    ((device float*)gradient)[index] = x;
  } else if (gradient_dtype == JFM_DTYPE_FLOAT16) {
    ((device half*)gradient)[index] = half(x);
  } else {
    ((device bfloat*)gradient)[index] = bfloat(x);
  }
}

METAL_FUNC int gradient_rows(constant AttentionParams& params) {
  return sums_rows ? 1 : params.q_len;
}
METAL_FUNC int gradient_cols(constant AttentionParams& params) {
  return sums_cols ? 1 : params.kv_len;
}

// Element (pair, row, col) of the gradient, or of the sum of one part.
METAL_FUNC void store_sum(
    constant AttentionParams& params, device uchar* gradient, device float* partial, int part,
    long pair, int row, int col, float x) {
  if (params.num_parts == 1) {
    const BatchHead kept = nth_pair(params, params.gradient, true, pair);
    const long offset = head_offset(params, params.gradient, kept.batch, kept.head);
    store_gradient(
        gradient, offset + row * params.gradient.row + long(col) * params.gradient_col, x);
  } else {
    const long num_pairs = count_pairs(params, params.gradient, true);
    const long line = (part * num_pairs + pair) * gradient_rows(params) + row;
    partial[line * gradient_cols(params) + col] = x;
  }
}

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_bias_gradient(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* delta [[buffer(JFM_BUFFER_DELTA)]],
    device uchar* gradient [[buffer(JFM_BUFFER_GRADIENT)]],
    device float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    JFM_SCORE_ARGUMENTS,
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8 * NUM_SIMDGROUPS, "a simdgroup owns 8 query rows");
  static_assert(BLOCK_KV % 8 == 0 && BLOCK_D % 16 == 0, "8x8 fragments, columns in pairs");
  static_assert(HEAD_DIM % BLOCK_D == 0, "tiles cut the columns");
  const uint3 group = whole_grid(params, position);
  constexpr int kKeyFragments = BLOCK_KV / 8;
  constexpr int kThreads = 32 * NUM_SIMDGROUPS;

  threadgroup T shared[tile_size<T, BLOCK_KV, BLOCK_D, LOADS>()];
  threadgroup float row_sums[NUM_SIMDGROUPS * BLOCK_KV];

  const uint thread_index = simdgroup * 32 + lane;
  const int row_blocks = (params.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int col_blocks = (params.kv_len + BLOCK_KV - 1) / BLOCK_KV;
  const int col_tiles = sums_cols ? 1 : col_blocks;
  const int row_tile = int(group.x) / col_tiles;
  const int col_tile = int(group.x) % col_tiles;
  const int part = int(group.y);
  const BatchHead kept = nth_pair(params, params.gradient, true, group.z);
  ScorePointers pointers;
  JFM_SCORE_POINTERS(pointers);

  Tile<T, BLOCK_KV, BLOCK_D, LOADS> tile;
  tile.shared = shared;
  Fragment sum[kKeyFragments];
  clear(sum);

  // The blocks that are summed: pairs, then rows, then columns, which run fastest.
  const int rows_summed = sums_rows ? row_blocks : 1;
  const int cols_summed = sums_cols ? col_blocks : 1;
  const long first_block = long(part) * params.blocks_per_part;
  const long end_block = min(
      first_block + params.blocks_per_part, long(params.num_summed) * rows_summed * cols_summed);
  for (long block = first_block; block < end_block; ++block) {
    const BatchHead summed =
        nth_pair(params, params.gradient, false, block / (long(rows_summed) * cols_summed));
    const int col_block = sums_cols ? int(block % cols_summed) : col_tile;
    const int row_block = sums_rows ? int(block / cols_summed % rows_summed) : row_tile;
    const int first_query = row_block * BLOCK_Q;
    const int first_key = col_block * BLOCK_KV;
    const uint batch = kept.batch + summed.batch;
    const int head = kept.head + summed.head;

    const ScoreOperands operands = load_score_operands(params, pointers, batch, head);
    const Range block_keys = visible_keys_of_block(params, operands, first_query, BLOCK_Q);
    if (first_key >= block_keys.end || first_key + BLOCK_KV <= block_keys.begin ||
        block_is_hidden(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV, lane)) {
      continue;
    }
    const int first_row = first_query + int(simdgroup) * 8;
    const int row = first_row + fragment_row(lane);
    QueryRows<T, HEAD_DIM, 1, false> rows;
    load_query_rows(
        params, operands, query, key, value, dout, delta, batch, head, first_row, lane, rows);
    Fragment ds[kKeyFragments];
    score_gradients_of_rows<kThreads>(
        params, operands, rows,
        block_is_interior(params, operands, first_query, BLOCK_Q, first_key, BLOCK_KV), false,
        first_key, tile, thread_index, ds);
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        float x = ds[j].thread_elements()[e];
        if (is_slope_gradient) {
          x *= -alibi_distance(operands, row, first_key + j * 8 + fragment_col(lane) + e);
        }
        sum[j].thread_elements()[e] += x;
      }
    }
  }

  if (sums_cols) {  // into column 0 of the tile
    float x = 0.0f;
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      x += sum[j].thread_elements()[0] + sum[j].thread_elements()[1];
    }
    sum[0].thread_elements()[0] = row_sum(x);
  }
  if (!sums_rows) {
    const int row = row_tile * BLOCK_Q + int(simdgroup) * 8 + fragment_row(lane);
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const int tile_col = j * 8 + fragment_col(lane) + e;
        const int col = col_tile * BLOCK_KV + tile_col;
        if (row < params.q_len && col < gradient_cols(params)) {
          store_sum(
              params, gradient, partial, part, group.z, row, col, sum[j].thread_elements()[e]);
        }
      }
    }
    return;
  }
  // Over the 8 rows of a simdgroup, whose lanes differ in bits 1, 2 and 4, then over these.
  JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      float x = sum[j].thread_elements()[e];
      x += simd_shuffle_xor(x, ushort(2));
      x += simd_shuffle_xor(x, ushort(4));
      x += simd_shuffle_xor(x, ushort(16));
      if (fragment_row(lane) == 0) {
        row_sums[int(simdgroup) * BLOCK_KV + j * 8 + fragment_col(lane) + e] = x;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int col = col_tile * BLOCK_KV + int(thread_index);
  if (int(thread_index) < BLOCK_KV && col < gradient_cols(params)) {
    float total = 0.0f;
    for (int i = 0; i < NUM_SIMDGROUPS; ++i) total += row_sums[i * BLOCK_KV + int(thread_index)];
    store_sum(params, gradient, partial, part, group.z, 0, col, total);
  }
}

// The sum of the parts, in their order; a thread per element.
//
// Grid: x = block of 32 · NUM_SIMDGROUPS elements [pair, row, column].
JFM_VARIANT_TEMPLATE
[[kernel]] void attention_bias_gradient_combine(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device uchar* gradient [[buffer(JFM_BUFFER_GRADIENT)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const long num_rows = gradient_rows(params);
  const long num_cols = gradient_cols(params);
  const long num_elements = count_pairs(params, params.gradient, true) * num_rows * num_cols;
  const long element = (long(group.x) * NUM_SIMDGROUPS + simdgroup) * 32 + lane;
  if (element >= num_elements) return;
  float sum = 0.0f;
  for (int p = 0; p < params.num_parts; ++p) sum += partial[p * num_elements + element];
  const int col = int(element % num_cols);
  const int row = int(element / num_cols % num_rows);
  const BatchHead kept =
      nth_pair(params, params.gradient, true, element / (num_rows * num_cols));
  const long offset = head_offset(params, params.gradient, kept.batch, kept.head);
  store_gradient(
      gradient, offset + row * params.gradient.row + long(col) * params.gradient_col, sum);
}
