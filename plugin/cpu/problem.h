// An attention problem as the CPU kernels take it: plain data, so that files compiled for
// different instruction sets can share it. problem.cc makes it from a HostProblem.
#pragma once

#include <cstdint>

#include "plugin/attention/problem.h"

namespace jfm::cpu {

// One operand or result in memory. Strides in elements; 0: shared over that dimension, of a
// gradient: summed.
struct Tensor {
  char* data;  // null: not given
  int64_t batch_strides[kMaxBatchDims];
  int64_t head_stride, row_stride, col_stride;
};

// See AttentionProblem for the layouts. No member functions that are not trivial and no
// standard library: see simd.h.
struct Problem {
  Dtype dtype, bias_dtype;
  GradientOf gradient_of;
  int32_t num_batch_dims;
  int64_t batch_sizes[kMaxBatchDims];
  int64_t num_batches;  // the product of batch_sizes
  int64_t q_len, kv_len, num_heads, num_kv_heads, num_groups, head_dim, value_head_dim;
  float scale;
  bool is_causal;
  int64_t q_offset;                   // within ±2^31, unless q_offsets is given
  int64_t window_left, window_right;  // -1: no limit
  float soft_cap;                     // 0: none
  uint32_t dropout_threshold;         // an element is kept iff its bits are below
  float dropout_scale;                // 1 / keep probability
  Tensor query, key, value;
  Tensor bias, mask, q_offsets, q_segment_ids, kv_segment_ids, query_lengths, kv_lengths, sinks,
      slopes, dropout_key, dropout_batch, dropout_head;
  Tensor out, logsumexp, dout, dlogsumexp;
  Tensor dquery, dkey, dvalue, gradient;
};

}  // namespace jfm::cpu
