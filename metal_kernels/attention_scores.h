// From a product q·k to a score: bias, ALiBi, softcap, who sees whom, dropout, and which
// blocks nobody sees. One meaning for every kernel, forward and backward. No kernel here.
//
//   x = scale·(q·k) + bias - slope·|i + q_offset - j|;  x = cap·tanh(x / cap)
//   hidden: outside causal, window and lengths (a range of keys per query, and of queries
//   per key), by segment ids, by the mask, by a bias of -inf
#pragma once

#include "attention_common.h"

// ---------------------------------------------------------------- operands

// The optional arguments of a kernel, after its own. Those that are off do not exist.
#define JFM_SCORE_ARGUMENTS                                                                    \
  device const uchar* bias [[buffer(JFM_BUFFER_BIAS), function_constant(has_bias)]],           \
  device const uchar* mask [[buffer(JFM_BUFFER_MASK), function_constant(has_mask)]],           \
  device const uchar* mask_blocks                                                              \
      [[buffer(JFM_BUFFER_MASK_BLOCKS), function_constant(has_mask)]],                         \
  device const int* q_offsets [[buffer(JFM_BUFFER_Q_OFFSET), function_constant(has_q_offset)]], \
  device const int* q_segment_ids                                                              \
      [[buffer(JFM_BUFFER_Q_SEGMENT_IDS), function_constant(has_segment_ids)]],                \
  device const int* kv_segment_ids                                                             \
      [[buffer(JFM_BUFFER_KV_SEGMENT_IDS), function_constant(has_segment_ids)]],               \
  device const int* query_lengths                                                              \
      [[buffer(JFM_BUFFER_QUERY_LENGTHS), function_constant(has_query_lengths)]],              \
  device const int* kv_lengths                                                                 \
      [[buffer(JFM_BUFFER_KV_LENGTHS), function_constant(has_kv_lengths)]],                    \
  device const float* slopes [[buffer(JFM_BUFFER_SLOPES), function_constant(has_slopes)]],     \
  device const uint* dropout_key                                                               \
      [[buffer(JFM_BUFFER_DROPOUT_KEY), function_constant(has_dropout)]],                      \
  device const int* dropout_batch                                                              \
      [[buffer(JFM_BUFFER_DROPOUT_BATCH), function_constant(has_dropout)]],                    \
  device const int* dropout_head                                                               \
      [[buffer(JFM_BUFFER_DROPOUT_HEAD), function_constant(has_dropout)]]

struct ScorePointers {
  device const uchar* bias;
  device const uchar* mask;
  device const uchar* mask_blocks;
  device const int* q_offsets;
  device const int* q_segment_ids;
  device const int* kv_segment_ids;
  device const int* query_lengths;
  device const int* kv_lengths;
  device const float* slopes;
  device const uint* dropout_key;
  device const int* dropout_batch;
  device const int* dropout_head;
};

// In a kernel that has JFM_SCORE_ARGUMENTS: `ScorePointers pointers; JFM_SCORE_POINTERS(pointers)`.
#define JFM_SCORE_POINTERS(p)                             \
  if (has_bias) p.bias = bias;                            \
  if (has_mask) p.mask = mask;                            \
  if (has_mask) p.mask_blocks = mask_blocks;              \
  if (has_q_offset) p.q_offsets = q_offsets;              \
  if (has_segment_ids) p.q_segment_ids = q_segment_ids;   \
  if (has_segment_ids) p.kv_segment_ids = kv_segment_ids; \
  if (has_query_lengths) p.query_lengths = query_lengths; \
  if (has_kv_lengths) p.kv_lengths = kv_lengths;          \
  if (has_slopes) p.slopes = slopes;                      \
  if (has_dropout) p.dropout_key = dropout_key;           \
  if (has_dropout) p.dropout_batch = dropout_batch;       \
  if (has_dropout) p.dropout_head = dropout_head;

// What the scores of one (batch, head) depend on besides query and key.
struct ScoreOperands {
  device const uchar* bias;  // first byte of (batch, head); see load_bias
  device const uchar* mask;
  device const uchar* mask_blocks;
  device const int* q_segment_ids;
  device const int* kv_segment_ids;
  int query_length;  // at most q_len
  int kv_length;     // at most kv_len
  int q_offset;
  float slope;
  uint2 dropout_key;  // of this batch and head
};

// ---------------------------------------------------------------- dropout

// Threefry-2x32 with 20 rounds (Salmon et al., SC 2011).
METAL_FUNC uint2 threefry2x32(uint2 key, uint2 x) {
  const uint keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
  const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x.x += keys[0];
  x.y += keys[1];
  JFM_UNROLL for (int group = 0; group < 5; ++group) {
    JFM_UNROLL for (int r = 0; r < 4; ++r) {
      const int rotation = rotations[(group % 2) * 4 + r];
      x.x += x.y;
      x.y = (x.y << rotation) | (x.y >> (32 - rotation));
      x.y ^= x.x;
    }
    x.x += keys[(group + 1) % 3];
    x.y += keys[(group + 2) % 3] + uint(group + 1);
  }
  return x;
}

// The bits of elements (query, key) and (query, key + 1) for an even key; for an odd key the
// same pair, of which it is the second.
METAL_FUNC uint2 dropout_words(thread const ScoreOperands& operands, int query, int key) {
  return threefry2x32(operands.dropout_key, uint2(uint(query), uint(key) / 2));
}

// The bits of one element, where there is dropout.
METAL_FUNC uint dropout_word(thread const ScoreOperands& operands, int query, int key) {
  return has_dropout ? dropout_words(operands, query, key)[key % 2] : 0;
}

// x if its element is kept, scaled; selected, because a dropped x may be infinite.
METAL_FUNC float dropped(constant AttentionParams& params, uint word, float x) {
  return word < params.dropout_threshold ? x * params.dropout_scale : 0.0f;
}

// ---------------------------------------------------------------- loading the operands

METAL_FUNC ScoreOperands load_score_operands(
    constant AttentionParams& params, thread const ScorePointers& pointers, uint batch, int head) {
  ScoreOperands operands;
  operands.query_length = params.q_len;
  operands.kv_length = params.kv_len;
  operands.q_offset = params.q_offset;
  if (has_bias) {
    const int size = bias_dtype == JFM_DTYPE_FLOAT32 ? 4 : 2;
    operands.bias = pointers.bias + size * head_offset(params, params.bias, batch, head);
  }
  if (has_mask) {
    operands.mask = pointers.mask + head_offset(params, params.mask, batch, head);
    operands.mask_blocks =
        pointers.mask_blocks + head_offset(params, params.mask_blocks, batch, head);
  }
  if (has_q_offset) {
    operands.q_offset = pointers.q_offsets[head_offset(params, params.q_offsets, batch, head)];
  }
  if (has_segment_ids) {
    operands.q_segment_ids =
        pointers.q_segment_ids + head_offset(params, params.q_segment_ids, batch, head);
    operands.kv_segment_ids =
        pointers.kv_segment_ids + head_offset(params, params.kv_segment_ids, batch, head);
  }
  if (has_query_lengths) {
    const int length =
        pointers.query_lengths[head_offset(params, params.query_lengths, batch, head)];
    operands.query_length = clamp(length, 0, params.q_len);
  }
  if (has_kv_lengths) {
    const int length = pointers.kv_lengths[head_offset(params, params.kv_lengths, batch, head)];
    operands.kv_length = clamp(length, 0, params.kv_len);
  }
  if (has_slopes) {
    operands.slope = pointers.slopes[head_offset(params, params.slopes, batch, head)];
  }
  if (has_dropout) {
    device const uint* key =
        pointers.dropout_key + head_offset(params, params.dropout_key, batch, head);
    const int b = pointers.dropout_batch[head_offset(params, params.dropout_batch, batch, head)];
    const int n = pointers.dropout_head[head_offset(params, params.dropout_head, batch, head)];
    operands.dropout_key = threefry2x32(uint2(key[0], key[1]), uint2(uint(b), uint(n)));
  }
  return operands;
}

// ---------------------------------------------------------------- who sees whom

// A half-open range of key or query positions; empty if end <= begin.
struct Range {
  int begin, end;
};

// The range from the first one's begin to the last one's end. An empty one begins at 0 too,
// so that it stays empty when its begin is rounded down to that of a block.
METAL_FUNC Range hull(Range first, Range last) {
  Range range = {first.begin, last.end};
  if (range.end <= range.begin) range.begin = range.end = 0;
  return range;
}

METAL_FUNC int clamp_position(long position, int length) {
  return int(clamp(position, long(0), long(length)));
}

// The keys that a query sees by causality, window and lengths. Both ends grow with the
// query, up to query_length; later queries see nothing.
METAL_FUNC Range visible_keys(
    constant AttentionParams& params, thread const ScoreOperands& operands, int query) {
  Range keys;
  keys.begin = 0;
  keys.end = query < operands.query_length ? operands.kv_length : 0;
  const long position = long(query) + long(operands.q_offset);
  if (is_causal) keys.end = min(keys.end, clamp_position(position + 1, params.kv_len));
  if (has_window) {
    if (params.window_left >= 0) {
      keys.begin = clamp_position(position - long(params.window_left), params.kv_len);
    }
    if (params.window_right >= 0) {
      keys.end = min(
          keys.end, clamp_position(position + long(params.window_right) + 1, params.kv_len));
    }
  }
  return keys;
}

// The keys that some query of [first_query, first_query + num_queries) sees.
METAL_FUNC Range visible_keys_of_block(
    constant AttentionParams& params, thread const ScoreOperands& operands, int first_query,
    int num_queries) {
  const int last_query = min(first_query + num_queries, operands.query_length) - 1;
  const Range none = {0, 0};
  if (last_query < first_query) return none;
  return hull(
      visible_keys(params, operands, first_query), visible_keys(params, operands, last_query));
}

// The queries that see a key by causality, window and lengths: visible_keys, turned round.
METAL_FUNC Range visible_queries(
    constant AttentionParams& params, thread const ScoreOperands& operands, int key) {
  Range queries;
  queries.begin = 0;
  queries.end = key < operands.kv_length ? operands.query_length : 0;
  const long position = long(key) - long(operands.q_offset);  // of a query at this key
  if (is_causal) queries.begin = clamp_position(position, params.q_len);
  if (has_window) {
    if (params.window_right >= 0) {
      queries.begin = max(
          queries.begin, clamp_position(position - long(params.window_right), params.q_len));
    }
    if (params.window_left >= 0) {
      queries.end = min(
          queries.end, clamp_position(position + long(params.window_left) + 1, params.q_len));
    }
  }
  return queries;
}

// The queries that see some key of [first_key, first_key + num_keys).
METAL_FUNC Range visible_queries_of_block(
    constant AttentionParams& params, thread const ScoreOperands& operands, int first_key,
    int num_keys) {
  const int last_key = min(first_key + num_keys, operands.kv_length) - 1;
  const Range none = {0, 0};
  if (last_key < first_key) return none;
  return hull(
      visible_queries(params, operands, first_key), visible_queries(params, operands, last_key));
}

// Whether nobody of a block sees anyone of another, as far as summaries tell: for the
// operands of all lanes of the simdgroup, which must call it together. Both blocks must begin
// inside the lengths.
METAL_FUNC bool block_is_hidden(
    constant AttentionParams& params, thread const ScoreOperands& operands, int first_query,
    int num_queries, int first_key, int num_keys, uint lane) {
  if (!has_mask && !has_segment_ids) return false;
  const int end_query = min(first_query + num_queries, operands.query_length);
  const int end_key = min(first_key + num_keys, operands.kv_length);
  bool hidden = false;
  if (has_mask) {
    // A mask that is shared over an axis has one row or column of blocks there.
    const bool one_row = params.mask.row == 0;
    const bool one_col = params.mask_col == 0;
    const int last_i = one_row ? 0 : (end_query - 1) / JFM_MASK_BLOCK;
    const int last_j = one_col ? 0 : (end_key - 1) / JFM_MASK_BLOCK;
    hidden = true;
    for (int i = one_row ? 0 : first_query / JFM_MASK_BLOCK; i <= last_i; ++i) {
      for (int j = one_col ? 0 : first_key / JFM_MASK_BLOCK; j <= last_j; ++j) {
        hidden = hidden && operands.mask_blocks[i * params.mask_blocks.row + j] == 0;
      }
    }
  }
  if (has_segment_ids) {
    // Exact for sequences packed one behind the other, whose ids are in order.
    int q_min = INT_MAX, q_max = INT_MIN, kv_min = INT_MAX, kv_max = INT_MIN;
    for (int i = first_query; i < end_query; i += 32) {
      const int id = operands.q_segment_ids[
          min(i + int(lane), end_query - 1) * params.q_segment_ids.row];
      q_min = min(q_min, id);
      q_max = max(q_max, id);
    }
    for (int i = first_key; i < end_key; i += 32) {
      const int id = operands.kv_segment_ids[
          min(i + int(lane), end_key - 1) * params.kv_segment_ids.row];
      kv_min = min(kv_min, id);
      kv_max = max(kv_max, id);
    }
    const bool before = simd_max(q_max) < simd_min(kv_min);
    const bool after = simd_max(kv_max) < simd_min(q_min);
    hidden = hidden || before || after;
  }
  return simd_all(hidden);
}

METAL_FUNC bool contains(Range range, int position) {
  return position >= range.begin && position < range.end;
}

// Whether an element may be hidden, or outside, by its position. Where it cannot, nothing is
// compared: the tiles fit.
METAL_FUNC bool compares_positions() {
  return !aligned_kv || !aligned_q || is_causal || has_window || has_kv_lengths ||
         has_query_lengths;
}

// Whether everybody of a block sees everyone of another, and both are inside: then no element
// is compared, and NaN may go its own way. The same for all lanes.
METAL_FUNC bool block_is_interior(
    constant AttentionParams& params, thread const ScoreOperands& operands, int first_query,
    int num_queries, int first_key, int num_keys) {
  if (has_mask || has_segment_ids || has_bias) return false;
  if (!compares_positions()) return true;
  const int last_query = first_query + num_queries - 1;
  // Both ends grow with the query.
  return last_query < operands.query_length &&
         visible_keys(params, operands, last_query).begin <= first_key &&
         visible_keys(params, operands, first_query).end >= first_key + num_keys;
}

METAL_FUNC float load_bias(
    constant AttentionParams& params, thread const ScoreOperands& operands, int query, int key) {
  const long i = query * params.bias.row + long(key) * params.bias_col;
  if (bias_dtype == JFM_DTYPE_FLOAT32) return ((device const float*)operands.bias)[i];
  if (bias_dtype == JFM_DTYPE_FLOAT16) return float(((device const half*)operands.bias)[i]);
  return float(((device const bfloat*)operands.bias)[i]);
}

// Visible by everything but the range: segments, mask, a bias of -inf. Reads the operands, so
// both positions must be inside. `bias` becomes the element of the bias, 0 without one.
METAL_FUNC bool is_unmasked(
    constant AttentionParams& params, thread const ScoreOperands& operands, int query, int key,
    thread float& bias) {
  bias = 0.0f;
  if (has_segment_ids && operands.q_segment_ids[query * params.q_segment_ids.row] !=
                             operands.kv_segment_ids[key * params.kv_segment_ids.row]) {
    return false;
  }
  if (has_mask && operands.mask[query * params.mask.row + long(key) * params.mask_col] == 0) {
    return false;
  }
  if (has_bias) {
    bias = load_bias(params, operands, query, key);
    return !is_minus_infinity(bias);
  }
  return true;
}

// `keys` is visible_keys of the query.
METAL_FUNC bool query_sees(
    constant AttentionParams& params, thread const ScoreOperands& operands, Range keys, int query,
    int key, thread float& bias) {
  bias = 0.0f;
  return (!compares_positions() || contains(keys, key)) &&
         is_unmasked(params, operands, query, key, bias);
}

// The same with visible_queries of the key.
METAL_FUNC bool key_is_seen(
    constant AttentionParams& params, thread const ScoreOperands& operands, Range queries,
    int query, int key, thread float& bias) {
  bias = 0.0f;
  return (!compares_positions() || contains(queries, query)) &&
         is_unmasked(params, operands, query, key, bias);
}

// ---------------------------------------------------------------- scores

// Where only q·k enters a score, it is in units of log2, which saves an instruction per
// element. Else it is in natural units: those of a bias of finfo.min would overflow, and
// hundreds of thousands lose bits in every change of units.
METAL_FUNC bool is_plain_score() { return !has_bias && !has_slopes && !has_softcap; }

// x · y, rounded: no compiler makes one fma of it and of a difference that follows. The digits that
// an fma does not round off are more than 128 of scores in the billions, and exp2 takes them.
METAL_FUNC float rounded_product(float x, float y) { return fma(x, y, 0.0f); }

METAL_FUNC float to_score_units(float x) {
  return is_plain_score() ? rounded_product(x, JFM_LOG2E) : x;
}
METAL_FUNC float from_score_units(float x) { return is_plain_score() ? x * JFM_LN2 : x; }
METAL_FUNC float exp_score(float x) { return exp2(is_plain_score() ? x : x * JFM_LOG2E); }
METAL_FUNC float log_score(float x) { return is_plain_score() ? log2(x) : log2(x) * JFM_LN2; }

METAL_FUNC float alibi_distance(thread const ScoreOperands& operands, int query, int key) {
  const long distance = long(query) + long(operands.q_offset) - long(key);
  return float(distance < 0 ? -distance : distance);
}

// The score of a visible element from dot = q·k; `slope` becomes its derivative by the score
// before the softcap.
METAL_FUNC float score(
    constant AttentionParams& params, thread const ScoreOperands& operands, int query, int key,
    float dot, float bias, thread float& slope) {
  slope = 1.0f;
  if (is_plain_score()) return rounded_product(dot, params.scale_log2);
  float x = dot * params.scale;
  if (has_bias) x += bias;
  if (has_slopes) x -= operands.slope * alibi_distance(operands, query, key);
  if (has_softcap) {
    // tanh would make an ordinary score of an infinite one.
    const float t = is_finite_value(x) ? precise::tanh(x / params.soft_cap) : quiet_nan();
    x = params.soft_cap * t;
    slope = 1.0f - t * t;
  }
  return x;
}
