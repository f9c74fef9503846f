// An attention problem whose tensors are the caller's: what both callers, the FFI handlers
// and the C ABI, fill in. Checks it, wraps the memory and runs it on a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plugin/attention/planner.h"
#include "plugin/attention/problem.h"
#include "plugin/device/device.h"
#include "plugin/status.h"

namespace jfm {

// More than any program has (XLA itself stops at fewer dimensions), small enough for
// fixed arrays in the C ABI.
constexpr int kMaxBatchDims = 16;

// Where a tensor stands in AttentionProblem and which of its sizes it has.
struct TensorSpec {
  using Size = int64_t AttentionProblem::*;
  const char* name;
  TensorView AttentionProblem::*view;
  Size rows;
  Size heads;
  // Null: one float32 per row, [*batch, heads, rows]. Otherwise elements of the
  // problem's dtype, [*batch, rows, heads, width].
  Size width;

  bool is_statistic() const { return width == nullptr; }
  Dtype dtype(const AttentionProblem& problem) const {
    return is_statistic() ? Dtype::kFloat32 : problem.dtype;
  }
};

// In the order of the wire format: the tensors of a pass are the first ones of this
// table, first its operands, then its results.
inline constexpr std::array<TensorSpec, 10> kTensors = {{
    {"query", &AttentionProblem::query, &AttentionProblem::q_len, &AttentionProblem::num_heads,
     &AttentionProblem::head_dim},
    {"key", &AttentionProblem::key, &AttentionProblem::kv_len, &AttentionProblem::num_kv_heads,
     &AttentionProblem::head_dim},
    {"value", &AttentionProblem::value, &AttentionProblem::kv_len, &AttentionProblem::num_kv_heads,
     &AttentionProblem::value_head_dim},
    {"out", &AttentionProblem::out, &AttentionProblem::q_len, &AttentionProblem::num_heads,
     &AttentionProblem::value_head_dim},
    {"logsumexp", &AttentionProblem::logsumexp, &AttentionProblem::q_len,
     &AttentionProblem::num_heads, nullptr},
    {"dout", &AttentionProblem::dout, &AttentionProblem::q_len, &AttentionProblem::num_heads,
     &AttentionProblem::value_head_dim},
    {"dlogsumexp", &AttentionProblem::dlogsumexp, &AttentionProblem::q_len,
     &AttentionProblem::num_heads, nullptr},
    {"dquery", &AttentionProblem::dquery, &AttentionProblem::q_len, &AttentionProblem::num_heads,
     &AttentionProblem::head_dim},
    {"dkey", &AttentionProblem::dkey, &AttentionProblem::kv_len, &AttentionProblem::num_kv_heads,
     &AttentionProblem::head_dim},
    {"dvalue", &AttentionProblem::dvalue, &AttentionProblem::kv_len,
     &AttentionProblem::num_kv_heads, &AttentionProblem::value_head_dim},
}};

// Every size of a problem, and the tensor (an index of kTensors) that it is read from
// when tensors come with shapes.
struct SizeSpec {
  const char* name;
  TensorSpec::Size size;
  int64_t min;
  size_t source;
};
inline constexpr std::array<SizeSpec, 6> kSizes = {{
    {"q_len", &AttentionProblem::q_len, 0, 0},
    {"kv_len", &AttentionProblem::kv_len, 0, 1},
    {"num_heads", &AttentionProblem::num_heads, 1, 0},
    {"num_kv_heads", &AttentionProblem::num_kv_heads, 1, 1},
    {"head_dim", &AttentionProblem::head_dim, 1, 0},
    {"value_head_dim", &AttentionProblem::value_head_dim, 1, 2},
}};

// Forward or backward: how many tensors of the table it has, and what plans it.
struct Pass {
  size_t num_operands;
  size_t num_tensors;
  Result<Plan> (*plan)(const AttentionProblem&);

  size_t num_results() const { return num_tensors - num_operands; }
};
extern const Pass kForwardPass;
extern const Pass kBackwardPass;

struct HostMemory {
  void* data = nullptr;  // may be null when there are no bytes
  int64_t size_bytes = 0;
  bool is_native = false;  // `data` is an object of the device, not an address
};

struct HostProblem {
  AttentionProblem problem;                        // its views have strides, but no buffers yet
  std::array<HostMemory, kTensors.size()> memory;  // parallel to kTensors
};

// Checks what every problem must fulfil: sizes, heads, and that each tensor's strides
// stay within its memory. Then runs it and waits.
Status RunOnHost(Device& device, const Pass& pass, HostProblem host);

}  // namespace jfm
