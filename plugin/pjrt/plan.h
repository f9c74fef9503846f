// A partitioned program as data: the C++ side of jax_flash_metal/plan.py, which says what
// each field means. Decoding checks every index, so that the executor need not.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plugin/pjrt/custom_call/types.h"
#include "plugin/status.h"

namespace jfm::pjrt {

using ValueId = int32_t;
constexpr ValueId kNoValue = -1;  // a token

enum class StepKind : int64_t { kSegment = 0, kCall = 1, kWhile = 2, kCase = 3, kIf = 4 };

struct PlannedCall {
  CallSpec spec;
  std::vector<std::pair<size_t, size_t>> aliases;  // operand, result
};

struct Step {
  StepKind kind = StepKind::kSegment;
  size_t index = 0;  // of Plan::segments or Plan::calls
  std::vector<ValueId> inputs;
  std::vector<ValueId> outputs;
  std::vector<int64_t> donated;  // positions in inputs
  std::vector<ValueId> dead;
  std::vector<size_t> blocks;
  size_t num_captures = 0;
};

struct Block {
  size_t num_values = 0;
  std::vector<ValueId> inputs;
  std::vector<ValueId> outputs;
  std::vector<ValueId> donated;
  std::vector<Step> steps;
};

struct Plan {
  std::string fingerprint;
  std::string program;
  std::string shadow;
  std::string options;
  std::vector<std::string> segments;
  std::vector<PlannedCall> calls;
  std::vector<Block> blocks;  // the first is main
  int64_t constants_segment = -1;
  std::vector<ValueId> constants;
  int64_t peak_intermediate_bytes = 0;
};

Result<Plan> DecodePlan(const std::string& bytes);

// xla::PrimitiveType to PJRT_BufferType; PJRT_BufferType_INVALID where there is none.
int32_t BufferTypeOf(int32_t primitive_type);
// Whether several elements may share a byte.
bool IsPacked(const TensorType& type);
// The other way; 0 where there is none.
int32_t PrimitiveTypeOf(int32_t buffer_type);

}  // namespace jfm::pjrt
