// A plan as text, for tests, counts and the model of a GPU: what is launched, nothing of memory.
#pragma once

#include <cstddef>
#include <string>

#include "plugin/attention/plan.h"
#include "plugin/attention/problem.h"

namespace jfm {

// A line of JSON, as jfm_attention_plan describes it; `needed`: if it is more than the caller has
// room for, the room for all of it, and the line is without the launches.
struct PlanText {
  std::string json;
  size_t needed = 0;
};
PlanText DescribePlan(const AttentionProblem& problem, int gpu_family, const Plan& plan,
                      size_t room);

// The same for a kernel of another backend than Metal, which is one call and has no family.
PlanText DescribeKernel(const AttentionProblem& problem, const std::string& kernel);

}  // namespace jfm
