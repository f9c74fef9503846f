// What the host and the kernels share: the parameter struct, buffer indices and
// function constants. Read by the Metal compiler and by C++; written once, here.
#pragma once

#ifdef __METAL_VERSION__
#define JFM_INT64 long
#define JFM_INT32 int
#define JFM_CONSTANT constant
#else
#include <cstddef>
#include <cstdint>
#define JFM_INT64 int64_t
#define JFM_INT32 int32_t
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
#define JFM_BUFFER_PARTIAL 12      // float32 partial rows of the split kernels
#define JFM_BUFFER_PARTIAL_LSE 13  // float32 partial logsumexp (log2 domain)
// 14…24 are kept for mask, bias, segment ids, lengths, sinks, slopes, dropout.

// Function constants: X(type, name, index). They belong to the pipeline; a feature
// that is off costs nothing. 8…31 are kept for the features to come.
#define JFM_FUNCTION_CONSTANTS(X) \
  X(bool, is_causal, 0)           \
  X(bool, aligned_q, 1)           \
  X(bool, aligned_kv, 2)          \
  X(int, head_dim, 3)             \
  X(int, value_head_dim, 4)

// Strides in elements. A batch stride of 0 means that the operand is shared.
struct TensorStrides {
  JFM_INT64 batch[JFM_MAX_BATCH_DIMS];
  JFM_INT64 head;
  JFM_INT64 row;
};

struct AttentionParams {
  TensorStrides query, key, value, out, dout, dquery, dkey, dvalue;
  TensorStrides logsumexp, dlogsumexp;  // float32, row = query position
  TensorStrides delta;                  // float32 scratch
  JFM_INT32 num_batch_dims;
  JFM_INT32 batch_sizes[JFM_MAX_BATCH_DIMS];
  JFM_INT32 num_heads;
  JFM_INT32 num_kv_heads;
  JFM_INT32 num_groups;  // query heads per kv head
  JFM_INT32 q_len;
  JFM_INT32 kv_len;
  JFM_INT32 q_offset;       // query i sees key j iff j <= i + q_offset (is_causal)
  JFM_INT32 num_splits;     // split kernels: parts of the key range
  JFM_INT32 keys_per_split; // a multiple of the kernel's block_kv
  JFM_INT32 first_group[3];  // of the whole grid: a long launch is cut into several
  float scale;       // multiplies the scores
  float scale_log2;  // scale * log2(e): the kernels work with exp2
};

#ifndef __METAL_VERSION__
static_assert(sizeof(TensorStrides) == 48, "layout shared with Metal");
static_assert(sizeof(AttentionParams) == 11 * 48 + 18 * 4, "layout shared with Metal");
static_assert(offsetof(AttentionParams, num_batch_dims) == 11 * 48, "layout shared with Metal");
static_assert(offsetof(AttentionParams, scale) == 11 * 48 + 16 * 4, "layout shared with Metal");
#endif
