// The planner: AttentionProblem -> launches (kernel, constants, parameters, grid) and
// scratch sizes. Pure: no device, no memory; the same on every platform.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "metal_kernels/attention_params.h"
#include "plugin/attention/problem.h"
#include "plugin/attention/tensors.h"
#include "plugin/status.h"

namespace jfm {

// One row x dtype of metal_kernels/variants.toml.
struct Variant {
  const char* kernel;
  Dtype dtype;
  int head_dim, block_q, block_kv, num_simdgroups;
  const char* host_name;
};

struct Binding {
  int index;  // [[buffer(index)]]
  Operand operand;
};

struct Launch {
  const Variant* variant;
  std::vector<FunctionConstant> constants;
  std::vector<Binding> bindings;
  AttentionParams params;
  // Elements to add to an operand's offset: non-zero only where the planner launches once
  // per index of an outer batch dimension. Indexed by Operand.
  std::array<int64_t, kNumOperands> offsets;
  Size3 threadgroups, threads_per_threadgroup;
  double work;  // about, as floating-point operations; 0: never long
};

struct Plan {
  std::vector<Launch> launches;
  // Scratch.
  int64_t delta_bytes = 0, partial_bytes = 0, partial_softmax_bytes = 0, mask_blocks_bytes = 0;
};

// Options as kernels take them.
struct KernelOptions {
  int32_t q_offset;
  int32_t window_left, window_right;  // -1: no limit
  uint32_t dropout_threshold;         // an element is kept iff its bits are below
  float dropout_scale;                // 1 / keep probability
};
KernelOptions OptionsOf(const AttentionProblem& problem);

// Whether there are kernels for the sizes, on any backend.
Status CheckLimits(const AttentionProblem& problem);

// No launch has much more work than this, at first kMaxWorkAtOnce. Process-wide; 0 sets that
// again. For tests and slow devices.
void SetMaxLaunchWork(double operations);

// Which tensors a pass has, as ranges of kTensors, and what plans it. Operands that may be
// missing are among them.
struct Pass {
  Operand last_operand;  // all from the first one
  Operand first_result, last_result;
  Result<Plan> (*plan)(const AttentionProblem&);

  bool IsResult(size_t tensor) const {
    return tensor >= Index(first_result) && tensor <= Index(last_result);
  }
  // The tensors of a problem, operands first.
  std::vector<size_t> Tensors(const AttentionProblem& problem) const;
};
extern const Pass kForwardPass;
extern const Pass kBackwardPass;
extern const Pass kGradientPass;  // of bias, sinks or alibi_slopes

// What every problem of the pass must fulfil before strides and memory are looked at: sizes,
// whose products 64 bits can count from here on, and that the options and the operands belong
// together.
Status CheckProblem(const Pass& pass, const AttentionProblem& problem);

}  // namespace jfm
