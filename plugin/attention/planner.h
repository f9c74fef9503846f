// The planner: AttentionProblem -> launches (kernel, constants, parameters, grid) and
// scratch sizes. Pure: no device, no memory; the same on every platform.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "metal_kernels/attention_params.h"
#include "plugin/attention/problem.h"
#include "plugin/status.h"

namespace jfm {

// One row x dtype of metal_kernels/variants.toml.
struct Variant {
  const char* kernel;
  Dtype dtype;
  int head_dim, block_q, block_kv, num_simdgroups;
  const char* host_name;
};

// What a kernel's buffer index is bound to.
enum class Operand : uint8_t {
  kQuery, kKey, kValue, kOut, kLogsumexp, kDout, kDlogsumexp, kDquery, kDkey, kDvalue,
  kDelta, kPartial, kPartialLse,  // scratch
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
  std::array<int64_t, 13> offsets;
  Size3 threadgroups, threads_per_threadgroup;
  double work;  // floating-point operations of its matrix products, about
};

struct Plan {
  std::vector<Launch> launches;
  int64_t delta_bytes = 0, partial_bytes = 0, partial_lse_bytes = 0;  // scratch
};

// No launch has much more work than this, at first kMaxWorkAtOnce. Process-wide; 0 sets that
// again. For tests and slow devices.
void SetMaxLaunchWork(double operations);

Result<Plan> PlanForward(const AttentionProblem& problem);
Result<Plan> PlanBackward(const AttentionProblem& problem);

}  // namespace jfm
