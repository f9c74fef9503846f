// What a problem must fulfil, whatever runs it, and its options as kernels take them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugin/attention/planner.h"
#include "plugin/attention/problem.h"
#include "plugin/status.h"

namespace jfm {

// What every problem of the pass must fulfil before strides and memory are looked at: sizes,
// whose products 64 bits can count from here on, and that the options and the operands belong
// together.
Status CheckProblem(const Pass& pass, const AttentionProblem& problem);

// Whether there are kernels for the sizes, on any backend.
Status CheckLimits(const AttentionProblem& problem);

struct KernelOptions {
  int32_t q_offset;
  int32_t window_left, window_right;  // -1: no limit
  uint32_t dropout_threshold;         // an element is kept iff its bits are below
  float dropout_scale;                // 1 / keep probability
};
KernelOptions OptionsOf(const AttentionProblem& problem);

// For messages.
const char* GradientName(const AttentionProblem& problem);
std::string ListText(const std::vector<int64_t>& values);

}  // namespace jfm
