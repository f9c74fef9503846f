// AttentionProblem: what is asked, in values. Built by the FFI handlers and the C ABI,
// read by the planner. Knows nothing of JAX.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plugin/device/device.h"

namespace jfm {

// More than any program has (XLA itself stops at fewer dimensions), small enough for
// fixed arrays in the C ABI.
constexpr int kMaxBatchDims = 16;

// What runs a problem: the kernels of metal_kernels/ on a Device, or those of plugin/cpu.
enum class Backend : int32_t { kMetal = 0, kCpu = 1 };

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };
inline int64_t SizeBytes(Dtype t) { return t == Dtype::kFloat32 ? 4 : 2; }
inline const char* Name(Dtype t) {
  return t == Dtype::kFloat32 ? "float32" : t == Dtype::kFloat16 ? "float16" : "bfloat16";
}

// One operand on the device. Strides in elements; 0: shared over that dimension.
struct TensorView {
  const Buffer* buffer = nullptr;
  uint64_t offset_bytes = 0;
  bool is_given = false;               // for the operands that a problem may be without
  std::vector<int64_t> batch_strides;  // one per batch dimension of the problem
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;  // of bias, mask and gradient: between keys, 0 or 1
};

// The operand whose gradient is asked for.
enum class GradientOf : int32_t { kBias = 0, kSinks = 1, kSlopes = 2 };

struct AttentionProblem {
  Backend backend = Backend::kMetal;
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> batch_sizes;
  int64_t q_len = 0, kv_len = 0, num_heads = 0, num_kv_heads = 0;
  int64_t head_dim = 0, value_head_dim = 0;
  float scale = 1;
  bool is_causal = false;
  int64_t q_offset = 0;                         // unless the operand q_offsets is given
  int64_t window_left = -1, window_right = -1;  // inclusive; -1: no limit
  float logits_soft_cap = 0;                    // 0: none
  double dropout_rate = 0;                      // with the three dropout operands
  Dtype bias_dtype = Dtype::kFloat32;
  // query [.., q_len, num_heads, head_dim], key [.., kv_len, num_kv_heads, head_dim], value
  // [.., kv_len, num_kv_heads, value_head_dim], out and dout like query with value_head_dim,
  // logsumexp and dlogsumexp float32 [.., num_heads, q_len].
  TensorView query, key, value;
  // May be missing. bias (bias_dtype) and mask (a byte each) [.., num_heads, q_len, kv_len]; int32:
  // q_offsets [..], q_segment_ids [.., q_len], kv_segment_ids [.., kv_len], query_seq_lengths
  // and key_value_seq_lengths [..]; float32: sinks and alibi_slopes [.., num_heads]; dropout:
  // uint32 key [.., 2], int32 batch_indices [..], head_indices [.., num_heads].
  TensorView bias, mask, q_offsets, q_segment_ids, kv_segment_ids, query_seq_lengths,
      key_value_seq_lengths, sinks, alibi_slopes, dropout_key, dropout_batch_indices,
      dropout_head_indices;
  // Inputs of the backward pass and of gradients.
  TensorView out, logsumexp, dout, dlogsumexp;
  TensorView dquery, dkey, dvalue;  // backward only
  // Gradient only: that of bias (bias_dtype), sinks or slopes (float32), like the operand.
  // It is summed over every dimension where its stride is 0.
  GradientOf gradient_of = GradientOf::kBias;
  TensorView gradient;
};

}  // namespace jfm
