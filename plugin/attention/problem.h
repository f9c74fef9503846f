// AttentionProblem: what is asked, in values. Built by the FFI handlers and the C ABI,
// read by the planner. Knows nothing of Metal or JAX.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plugin/device/device.h"

namespace jfm {

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };
inline int64_t SizeBytes(Dtype t) { return t == Dtype::kFloat32 ? 4 : 2; }
inline const char* Name(Dtype t) {
  return t == Dtype::kFloat32 ? "float32" : t == Dtype::kFloat16 ? "float16" : "bfloat16";
}

// One operand on the device. Strides in elements; batch[i] = 0: shared over that dimension.
struct TensorView {
  const Buffer* buffer = nullptr;
  uint64_t offset_bytes = 0;
  std::vector<int64_t> batch_strides;  // one per batch dimension of the problem
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

struct AttentionProblem {
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> batch_sizes;
  int64_t q_len = 0, kv_len = 0, num_heads = 0, num_kv_heads = 0;
  int64_t head_dim = 0, value_head_dim = 0;
  float scale = 1;
  bool is_causal = false;
  int64_t q_offset = 0;
  // query [.., q_len, num_heads, head_dim], key [.., kv_len, num_kv_heads, head_dim], value
  // [.., kv_len, num_kv_heads, value_head_dim], out and dout like query with value_head_dim,
  // logsumexp and dlogsumexp float32 [.., num_heads, q_len].
  TensorView query, key, value, out, logsumexp;
  // backward only: out and logsumexp are inputs then
  TensorView dout, dlogsumexp, dquery, dkey, dvalue;
};

}  // namespace jfm
