// The planner: AttentionProblem -> launches (kernel, constants, parameters, grid) and
// scratch sizes. Pure: no device, no memory, no globals; the same on every platform.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plugin/attention/plan.h"
#include "plugin/attention/plan_context.h"
#include "plugin/attention/problem.h"
#include "plugin/attention/tensors.h"
#include "plugin/status.h"

namespace jfm {

constexpr int64_t kShortQuery = 8;  // the split kernels take q_len up to this

// Which tensors a pass has, as ranges of kTensors, and what plans it. Operands that may be
// missing are among them.
struct Pass {
  const char* name;
  Operand last_operand;  // all from the first one
  Operand first_result, last_result;
  Result<Plan> (*plan)(const AttentionProblem&, const PlanContext&);

  bool IsResult(size_t tensor) const {
    return tensor >= Index(first_result) && tensor <= Index(last_result);
  }
  // The tensors of a problem, operands first.
  std::vector<size_t> Tensors(const AttentionProblem& problem) const;
};
extern const Pass kForwardPass;
extern const Pass kBackwardPass;
extern const Pass kGradientPass;  // of bias, sinks or alibi_slopes

}  // namespace jfm
