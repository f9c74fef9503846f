// The reader of the wire format of jax_flash_metal/plan.py.
#include "plugin/pjrt/plan.h"

#include <cstring>
#include <utility>

#include "plugin/pjrt/pjrt_api.h"

namespace jfm::pjrt {
namespace {

constexpr int64_t kPlanVersion = 1;

// Reads on until something is wrong, and then gives zeros: one check at the end is enough.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  int64_t Int() {
    int64_t value = 0;
    if (const char* data = Take(sizeof(value))) std::memcpy(&value, data, sizeof(value));
    return value;
  }

  std::string Bytes() {
    const size_t size = Count(1);
    const char* data = Take(size);
    return data == nullptr ? std::string() : std::string(data, size);
  }

  // A number of items of at least `item_size` bytes each, all of which must be there.
  size_t Count(size_t item_size) {
    const int64_t count = Int();
    if (count < 0 || static_cast<size_t>(count) > (bytes_.size() - position_) / item_size) {
      failed_ = true;
      return 0;
    }
    return static_cast<size_t>(count);
  }

  template <class Item, class Read>
  std::vector<Item> List(Read&& read) {
    const size_t count = Count(sizeof(int64_t));
    std::vector<Item> items;
    items.reserve(count);
    for (size_t i = 0; i < count && !failed_; ++i) items.push_back(read());
    return items;
  }

  template <class Integer>
  std::vector<Integer> Ints() {
    return List<Integer>([this] { return static_cast<Integer>(Int()); });
  }

  bool ok() const { return !failed_; }
  bool at_end() const { return position_ == bytes_.size(); }

 private:
  const char* Take(size_t size) {
    if (failed_ || size > bytes_.size() - position_) {
      failed_ = true;
      return nullptr;
    }
    position_ += size;
    return bytes_.data() + position_ - size;
  }

  const std::string& bytes_;
  size_t position_ = 0;
  bool failed_ = false;
};

TensorType ReadTensor(Reader& reader) {
  TensorType type;
  type.dtype = static_cast<int32_t>(reader.Int());
  type.dims = reader.Ints<int64_t>();
  return type;
}

Attributes ReadAttributes(Reader& reader) {
  using Entry = std::pair<std::string, AttributeValue>;
  return reader.List<Entry>([&reader] {
    Entry entry;
    entry.first = reader.Bytes();
    AttributeValue& value = entry.second;
    value.kind = static_cast<AttributeKind>(reader.Int());
    if (value.kind == AttributeKind::kDictionary) {
      value.entries = ReadAttributes(reader);
      return entry;
    }
    if (value.kind != AttributeKind::kString) value.dtype = static_cast<int32_t>(reader.Int());
    if (value.kind == AttributeKind::kArray) value.count = reader.Int();
    value.data = reader.Bytes();
    return entry;
  });
}

PlannedCall ReadCall(Reader& reader) {
  PlannedCall call;
  call.spec.target = reader.Bytes();
  call.spec.attributes = ReadAttributes(reader);
  const auto read_tensor = [&reader] { return ReadTensor(reader); };
  call.spec.operands = reader.List<TensorType>(read_tensor);
  call.spec.results = reader.List<TensorType>(read_tensor);
  call.aliases = reader.List<std::pair<size_t, size_t>>([&reader] {
    const size_t operand = static_cast<size_t>(reader.Int());
    return std::make_pair(operand, static_cast<size_t>(reader.Int()));
  });
  reader.Int();  // whether it has side effects: the plan keeps their order
  return call;
}

Step ReadStep(Reader& reader) {
  Step step;
  step.kind = static_cast<StepKind>(reader.Int());
  step.index = static_cast<size_t>(reader.Int());
  step.inputs = reader.Ints<ValueId>();
  step.outputs = reader.Ints<ValueId>();
  step.donated = reader.Ints<int64_t>();
  step.dead = reader.Ints<ValueId>();
  step.blocks = reader.Ints<size_t>();
  step.num_captures = static_cast<size_t>(reader.Int());
  return step;
}

Block ReadBlock(Reader& reader) {
  Block block;
  block.num_values = static_cast<size_t>(reader.Int());
  block.inputs = reader.Ints<ValueId>();
  block.outputs = reader.Ints<ValueId>();
  block.donated = reader.Ints<ValueId>();
  block.steps = reader.List<Step>([&reader] { return ReadStep(reader); });
  return block;
}

bool AreValues(const std::vector<ValueId>& ids, const Block& block, bool tokens = false) {
  for (ValueId id : ids) {
    if (id == kNoValue && tokens) continue;
    if (id < 0 || static_cast<size_t>(id) >= block.num_values) return false;
  }
  return true;
}

bool CheckCall(const Plan& plan, const Step& step) {
  if (step.index >= plan.calls.size()) return false;
  const PlannedCall& call = plan.calls[step.index];
  if (step.inputs.size() != call.spec.operands.size()) return false;
  if (step.outputs.size() != call.spec.results.size()) return false;
  for (const auto& [operand, result] : call.aliases) {
    if (operand >= step.inputs.size() || result >= step.outputs.size()) return false;
    if (step.inputs[operand] == kNoValue || step.outputs[result] == kNoValue) return false;
    if (call.spec.operands[operand].size_bytes() != call.spec.results[result].size_bytes()) {
      return false;
    }
  }
  return true;
}

// `own`: the block that the step is in. Nested blocks come later in the list, so no block
// can contain itself.
bool CheckBlocks(const Plan& plan, size_t own, const Step& step) {
  for (size_t nested : step.blocks) {
    if (nested <= own || nested >= plan.blocks.size()) return false;
  }
  const auto has_arity = [&](size_t nested, size_t inputs, size_t outputs) {
    const Block& block = plan.blocks[nested];
    return block.inputs.size() == inputs && block.outputs.size() == outputs;
  };
  if (step.kind == StepKind::kWhile) {
    if (step.blocks.size() != 2 || step.num_captures > step.inputs.size()) return false;
    const size_t num_carry = step.inputs.size() - step.num_captures;
    return step.outputs.size() == num_carry && has_arity(step.blocks[0], step.inputs.size(), 1) &&
           has_arity(step.blocks[1], step.inputs.size(), num_carry);
  }
  const bool is_if = step.kind == StepKind::kIf;
  if (step.blocks.empty() || (is_if && step.blocks.size() != 2)) return false;
  if (step.inputs.size() != step.num_captures + 1) return false;
  for (size_t nested : step.blocks) {
    if (!has_arity(nested, step.num_captures, step.outputs.size())) return false;
  }
  return true;
}

bool CheckStep(const Plan& plan, size_t own, const Step& step) {
  const Block& block = plan.blocks[own];
  const bool is_call = step.kind == StepKind::kCall;
  if (!AreValues(step.inputs, block, is_call) || !AreValues(step.outputs, block, is_call) ||
      !AreValues(step.dead, block)) {
    return false;
  }
  for (int64_t position : step.donated) {
    if (position < 0 || static_cast<size_t>(position) >= step.inputs.size()) return false;
  }
  switch (step.kind) {
    case StepKind::kSegment:
      return step.index < plan.segments.size();
    case StepKind::kCall:
      return CheckCall(plan, step);
    case StepKind::kWhile:
    case StepKind::kCase:
    case StepKind::kIf:
      return CheckBlocks(plan, own, step);
  }
  return false;
}

bool CheckPlan(const Plan& plan) {
  if (plan.blocks.empty() || !AreValues(plan.constants, plan.blocks[0])) return false;
  if (plan.constants_segment < -1 ||
      plan.constants_segment >= static_cast<int64_t>(plan.segments.size())) {
    return false;
  }
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    const Block& block = plan.blocks[i];
    if (!AreValues(block.inputs, block) || !AreValues(block.outputs, block) ||
        !AreValues(block.donated, block)) {
      return false;
    }
    for (const Step& step : block.steps) {
      if (!CheckStep(plan, i, step)) return false;
    }
  }
  return true;
}

// Indexed by xla::PrimitiveType.
constexpr int32_t kBufferTypes[] = {
    PJRT_BufferType_INVALID,    PJRT_BufferType_PRED,       PJRT_BufferType_S8,
    PJRT_BufferType_S16,        PJRT_BufferType_S32,        PJRT_BufferType_S64,
    PJRT_BufferType_U8,         PJRT_BufferType_U16,        PJRT_BufferType_U32,
    PJRT_BufferType_U64,        PJRT_BufferType_F16,        PJRT_BufferType_F32,
    PJRT_BufferType_F64,        PJRT_BufferType_INVALID,    PJRT_BufferType_INVALID,
    PJRT_BufferType_C64,        PJRT_BufferType_BF16,       PJRT_BufferType_TOKEN,
    PJRT_BufferType_C128,       PJRT_BufferType_F8E5M2,     PJRT_BufferType_F8E4M3FN,
    PJRT_BufferType_S4,         PJRT_BufferType_U4,         PJRT_BufferType_F8E4M3B11FNUZ,
    PJRT_BufferType_F8E5M2FNUZ, PJRT_BufferType_F8E4M3FNUZ, PJRT_BufferType_S2,
    PJRT_BufferType_U2,         PJRT_BufferType_F8E4M3,     PJRT_BufferType_F8E3M4,
    PJRT_BufferType_INVALID,    PJRT_BufferType_INVALID,    PJRT_BufferType_F4E2M1FN,
    PJRT_BufferType_F8E8M0FNU,
};
constexpr int32_t kNumTypes = sizeof(kBufferTypes) / sizeof(kBufferTypes[0]);

}  // namespace

Result<Plan> DecodePlan(const std::string& bytes) {
  Reader reader(bytes);
  const int64_t version = reader.Int();
  if (version != kPlanVersion) {
    return Internal("the plan of a program has version " + std::to_string(version) + ", but " +
                    std::to_string(kPlanVersion) +
                    " is needed: the Python package and its library are of different releases.");
  }
  Plan plan;
  plan.fingerprint = reader.Bytes();
  plan.program = reader.Bytes();
  plan.shadow = reader.Bytes();
  plan.options = reader.Bytes();
  plan.segments = reader.List<std::string>([&reader] { return reader.Bytes(); });
  plan.calls = reader.List<PlannedCall>([&reader] { return ReadCall(reader); });
  plan.blocks = reader.List<Block>([&reader] { return ReadBlock(reader); });
  plan.constants_segment = reader.Int();
  plan.constants = reader.Ints<ValueId>();
  plan.peak_intermediate_bytes = reader.Int();
  if (!reader.ok() || !reader.at_end()) return Internal("the plan of a program is cut short.");
  if (!CheckPlan(plan)) return Internal("the plan of a program contradicts itself.");
  return plan;
}

int32_t BufferTypeOf(int32_t primitive_type) {
  return primitive_type >= 0 && primitive_type < kNumTypes ? kBufferTypes[primitive_type]
                                                           : PJRT_BufferType_INVALID;
}

int32_t PrimitiveTypeOf(int32_t buffer_type) {
  for (int32_t type = 1; type < kNumTypes; ++type) {
    if (kBufferTypes[type] == buffer_type) return type;
  }
  return 0;
}

bool IsPacked(const TensorType& type) {
  switch (BufferTypeOf(type.dtype)) {
    case PJRT_BufferType_S2:
    case PJRT_BufferType_U2:
    case PJRT_BufferType_S4:
    case PJRT_BufferType_U4:
    case PJRT_BufferType_F4E2M1FN:
      return true;
    default:
      return false;
  }
}

}  // namespace jfm::pjrt
