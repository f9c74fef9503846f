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

// What a kernel's buffer index is bound to: the tensors in the order of kTensors, then scratch.
enum class Operand : uint8_t {
  kQuery, kKey, kValue,
  kBias, kMask, kQOffsets, kQSegmentIds, kKvSegmentIds, kQuerySeqLengths, kKeyValueSeqLengths,
  kSinks, kAlibiSlopes, kDropoutKey, kDropoutBatchIndices, kDropoutHeadIndices,
  kOut, kLogsumexp, kDout, kDlogsumexp, kDquery, kDkey, kDvalue, kGradient,
  kDelta, kPartial, kPartialSoftmax, kMaskBlocks,
};
constexpr size_t kNumOperands = static_cast<size_t>(Operand::kMaskBlocks) + 1;
static_assert(static_cast<size_t>(Operand::kDelta) == kTensors.size(), "as in kTensors");

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
  double work;  // floating-point operations of its matrix products, about
};

struct Plan {
  std::vector<Launch> launches;
  // Scratch.
  int64_t delta_bytes = 0, partial_bytes = 0, partial_softmax_bytes = 0, mask_blocks_bytes = 0;
};

// No launch has much more work than this, at first kMaxWorkAtOnce. Process-wide; 0 sets that
// again. For tests and slow devices.
void SetMaxLaunchWork(double operations);

// Which tensors a pass has, as ranges of kTensors, and what plans it. Operands that may be
// missing are among them.
struct Pass {
  size_t num_operands;  // the first ones
  size_t first_result, num_results;
  Result<Plan> (*plan)(const AttentionProblem&);

  bool IsResult(size_t tensor) const {
    return tensor >= first_result && tensor < first_result + num_results;
  }
  // The tensors of a problem, operands first.
  std::vector<size_t> Tensors(const AttentionProblem& problem) const;
};
extern const Pass kForwardPass;
extern const Pass kBackwardPass;
extern const Pass kGradientPass;  // of bias, sinks or alibi_slopes

// What every problem of the pass must fulfil before strides and memory are looked at: sizes,
// and that the options and the operands belong together.
Status CheckProblem(const Pass& pass, const AttentionProblem& problem);

}  // namespace jfm
