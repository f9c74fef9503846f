// What the host and the kernels share: the parameter struct, buffer indices and
// function constants. Read by the Metal compiler and by C++; written once, here.
#pragma once

#ifdef __METAL_VERSION__
#define JFM_INT64 long
#define JFM_INT32 int
#define JFM_UINT32 uint
#define JFM_CONSTANT constant
#else
#include <cstddef>
#include <cstdint>
#define JFM_INT64 int64_t
#define JFM_INT32 int32_t
#define JFM_UINT32 uint32_t
#define JFM_CONSTANT static constexpr
#endif

// Batch dimensions a kernel can address with one stride per operand each. The
// planner merges neighbouring dimensions first and launches once per index of
// any outer dimension beyond these.
#define JFM_MAX_BATCH_DIMS 4

// Buffer indices. Macros, because MSL attributes want literals.
#define JFM_BUFFER_PARAMS 0
#define JFM_BUFFER_QUERY 1
#define JFM_BUFFER_KEY 2
#define JFM_BUFFER_VALUE 3
#define JFM_BUFFER_OUT 4
#define JFM_BUFFER_LOGSUMEXP 5
#define JFM_BUFFER_DOUT 6
#define JFM_BUFFER_DLOGSUMEXP 7
#define JFM_BUFFER_DELTA 8
#define JFM_BUFFER_DQUERY 9
#define JFM_BUFFER_DKEY 10
#define JFM_BUFFER_DVALUE 11
#define JFM_BUFFER_PARTIAL 12      // float32 partial results
#define JFM_BUFFER_PARTIAL_SOFTMAX 13  // float32 pairs: maximum and sum of a split
#define JFM_BUFFER_BIAS 14
#define JFM_BUFFER_MASK 15                // one byte each, 0 = hidden
#define JFM_BUFFER_Q_OFFSET 16            // int32 per batch index
#define JFM_BUFFER_Q_SEGMENT_IDS 17       // int32
#define JFM_BUFFER_KV_SEGMENT_IDS 18      // int32
#define JFM_BUFFER_QUERY_LENGTHS 19       // int32 per batch index
#define JFM_BUFFER_KV_LENGTHS 20          // int32 per batch index
#define JFM_BUFFER_SINKS 21               // float32 per head
#define JFM_BUFFER_SLOPES 22              // float32 per head
#define JFM_BUFFER_DROPOUT_KEY 23         // two uint32 per batch index
#define JFM_BUFFER_DROPOUT_BATCH 24       // int32 per batch index
#define JFM_BUFFER_DROPOUT_HEAD 25        // int32 per head
#define JFM_BUFFER_MASK_BLOCKS 26         // scratch: one byte per block of the mask
#define JFM_BUFFER_GRADIENT 27            // of bias, sinks or slopes
#define JFM_BUFFER_SCORE_GRADIENT 28      // scratch: dS of a chunk, see params
#define JFM_BUFFER_PARTIAL_DVALUE 29      // float32 partial results beside PARTIAL's
#define JFM_BUFFER_DQUERY_SUM 30          // float32 sums of dQ between chunks of keys

// Function constants: X(type, name, index). They belong to the pipeline; a feature
// that is off costs nothing.
#define JFM_FUNCTION_CONSTANTS(X) \
  X(bool, is_causal, 0)           \
  X(bool, aligned_q, 1)           \
  X(bool, aligned_kv, 2)          \
  X(int, head_dim, 3)             \
  X(int, value_head_dim, 4)       \
  X(bool, has_bias, 5)            \
  X(int, bias_dtype, 6)           \
  X(bool, has_mask, 7)            \
  X(bool, has_q_offset, 8)        \
  X(bool, has_segment_ids, 9)     \
  X(bool, has_query_lengths, 10)  \
  X(bool, has_kv_lengths, 11)     \
  X(bool, has_sinks, 12)          \
  X(bool, has_slopes, 13)         \
  X(bool, has_dropout, 14)        \
  X(bool, has_window, 15)         \
  X(bool, has_softcap, 16)        \
  X(bool, is_slope_gradient, 17)  \
  X(bool, sums_rows, 18)          \
  X(bool, sums_cols, 19)          \
  X(int, gradient_dtype, 20)      \
  X(bool, writes_score_gradient, 21) \
  X(bool, writes_partials, 22)    \
  X(bool, has_wide_rows, 23)

// has_wide_rows: some row stride of query, key, value or dout is JFM_WIDE_ROW elements
// or more: an offset within a tile may need 64 bits.
#define JFM_WIDE_ROW (1 << 24)

// Values of bias_dtype and gradient_dtype.
#define JFM_DTYPE_FLOAT32 0
#define JFM_DTYPE_FLOAT16 1
#define JFM_DTYPE_BFLOAT16 2

// Queries and keys of one block of the mask's summary. A power of two.
#define JFM_MASK_BLOCK 32

// Strides in elements. A stride of 0 means that the operand is shared over that dimension
// (of a gradient: summed).
struct TensorStrides {
  JFM_INT64 batch[JFM_MAX_BATCH_DIMS];
  JFM_INT64 head;
  JFM_INT64 row;
};

struct AttentionParams {
  TensorStrides query, key, value, out, dout, dquery, dkey, dvalue;
  TensorStrides logsumexp, dlogsumexp;  // float32, row = query position
  TensorStrides delta;                  // float32 scratch, four a row: see attention_delta
  TensorStrides bias, mask;             // row = query position; columns below
  TensorStrides q_offsets;
  TensorStrides q_segment_ids;   // row = query position
  TensorStrides kv_segment_ids;  // row = key position
  TensorStrides query_lengths, kv_lengths, sinks, slopes;
  TensorStrides dropout_key, dropout_batch, dropout_head;
  TensorStrides mask_blocks;  // row = row of blocks, columns dense; 0 as in mask
  TensorStrides gradient;     // row = query position
  // Backward with the score gradient in scratch: dS of the pairs (batch index, query head) from
  // first_pair on and the keys from first_chunk_key on, in blocks of 8 x 8. Element (query, key)
  // of pair p is number (key % 8) * 8 + query % 8 of block
  // ((p - first_pair) * num_query_fragments + query / 8) * num_key_fragments
  //   + (key - first_chunk_key) / 8.
  JFM_INT64 first_pair;
  JFM_INT32 num_query_fragments, num_key_fragments;
  JFM_INT32 first_chunk_key, end_chunk_key;
  JFM_INT32 is_first_chunk, is_last_chunk;  // of keys; between them dQ is in float32
  JFM_INT32 score_block_q, score_block_kv;  // blocks in which it was written, or left out
  JFM_INT32 num_batch_dims;
  JFM_INT32 batch_sizes[JFM_MAX_BATCH_DIMS];
  JFM_INT32 num_heads;
  JFM_INT32 num_kv_heads;
  JFM_INT32 num_groups;  // query heads per kv head
  JFM_INT32 q_len;
  JFM_INT32 kv_len;
  JFM_INT32 q_offset;       // position of the first query among the keys; see has_q_offset
  JFM_INT32 num_splits;     // split kernels: parts of the key range
  JFM_INT32 keys_per_split; // a multiple of the kernel's block_kv
  JFM_INT32 first_group[3];  // of the whole grid: a long launch is cut into several
  JFM_INT32 bias_col, mask_col, gradient_col;  // stride between keys: 0 or 1
  JFM_INT32 window_left, window_right;         // inclusive; -1: no limit
  JFM_UINT32 dropout_threshold;  // an element is kept iff its bits are below
  // Gradients of bias, slopes and sinks: (batch, head) pairs that are summed into one
  // result. How this sum, or that of dK and dV over queries and heads, is cut.
  JFM_INT32 num_summed;
  JFM_INT32 num_parts;
  JFM_INT32 blocks_per_part;
  float scale;       // multiplies the scores
  float scale_log2;  // scale * log2(e): the kernels work with exp2
  float soft_cap;
  float dropout_scale;  // 1 / keep probability
};

#ifndef __METAL_VERSION__
static_assert(sizeof(TensorStrides) == 48, "layout shared with Metal");
static_assert(sizeof(AttentionParams) == 25 * 48 + 8 + 38 * 4, "layout shared with Metal");
static_assert(offsetof(AttentionParams, first_pair) == 25 * 48, "layout shared with Metal");
static_assert(offsetof(AttentionParams, dropout_scale) == 25 * 48 + 8 + 36 * 4, "shared");
#endif
