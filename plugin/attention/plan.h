// A plan: the launches of a pass and their scratch, as values. Made by the planner, run by
// attention.cc, written down by plan_json.cc.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "metal_kernels/attention_params.h"
#include "plugin/attention/tensors.h"
#include "plugin/attention/variants.h"
#include "plugin/device/device.h"

namespace jfm {

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
  std::array<int64_t, kNumScratch> scratch_bytes{};
  Form form = Form::kNone;
  bool is_measured = false;  // by a measured choice, not by the table's defaults

  int64_t& ScratchBytes(Operand operand) { return scratch_bytes[Index(operand) - kNumTensors]; }
};

}  // namespace jfm
