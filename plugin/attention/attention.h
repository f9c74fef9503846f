// What is done with a plan. Knows how kernels are launched, not which.
#pragma once

#include "plugin/attention/plan.h"
#include "plugin/attention/problem.h"
#include "plugin/device/device.h"

namespace jfm {

// Allocates scratch, encodes, waits. The plan is that of the problem.
Status RunPlan(Device& device, const AttentionProblem& problem, const Plan& plan);

// Only gets the pipelines that a run would need, so that it need not wait for a compiler.
Status CompilePlan(Device& device, const Plan& plan);

}  // namespace jfm
