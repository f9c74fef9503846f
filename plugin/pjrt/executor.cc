// The interpreter of plans.
#include "plugin/pjrt/executor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <utility>

#include "plugin/ffi/xla_ffi.h"

namespace jfm::pjrt {
namespace {

std::atomic<int64_t> num_calls_run{0};

class Executor {
 public:
  Executor(const Program& program, const ExecuteContext& context)
      : program_(program), context_(context) {}

  Result<std::vector<BufferRef>> RunBlock(size_t index, std::vector<BufferRef> inputs) {
    const Block& block = program_.plan().blocks[index];
    std::vector<BufferRef> values(block.num_values);
    for (size_t i = 0; i < inputs.size(); ++i) {
      values[static_cast<size_t>(block.inputs[i])] = std::move(inputs[i]);
    }
    if (index == 0) {
      const std::vector<ValueId>& constants = program_.plan().constants;
      for (size_t i = 0; i < constants.size(); ++i) {
        values[static_cast<size_t>(constants[i])] = program_.constants()[i];
      }
    }
    for (const Step& step : block.steps) {
      if (Status status = RunStep(step, values); !status.ok()) return status;
      for (ValueId dead : step.dead) values[static_cast<size_t>(dead)].reset();
    }
    std::vector<BufferRef> outputs;
    for (ValueId id : block.outputs) {
      const BufferRef& output = values[static_cast<size_t>(id)];
      if (output == nullptr) return Undefined();
      outputs.push_back(output);
    }
    return outputs;
  }

 private:
  using Values = std::vector<BufferRef>;

  static Status Undefined() { return Internal("the plan of a program uses a value too early."); }

  Status RunStep(const Step& step, Values& values) {
    for (ValueId id : step.inputs) {
      if (id != kNoValue && values[static_cast<size_t>(id)] == nullptr) return Undefined();
    }
    switch (step.kind) {
      case StepKind::kSegment:
        return RunSegment(step, values);
      case StepKind::kCall:
        return RunCall(step, values);
      case StepKind::kWhile:
        return RunWhile(step, values);
      case StepKind::kCase:
      case StepKind::kIf:
        return RunBranch(step, values);
    }
    return Internal("the plan of a program has a step of an unknown kind.");
  }

  // An input of a step: taken out of the block's values when the step is its last use, so
  // that whoever gets it can see that nobody else has it.
  static BufferRef Take(const Step& step, ValueId id, Values& values) {
    BufferRef& value = values[static_cast<size_t>(id)];
    const bool is_last_use = std::find(step.dead.begin(), step.dead.end(), id) != step.dead.end() &&
                             std::count(step.inputs.begin(), step.inputs.end(), id) == 1;
    return is_last_use ? std::move(value) : value;
  }

  static bool MayReuse(const BufferRef& buffer) {
    return buffer.use_count() == 1 && buffer->is_expendable();
  }

  // Whether a handler may write its result over an operand.
  static bool MayOverwrite(const BufferRef& buffer) {
    return MayReuse(buffer) && buffer->is_owned() && !buffer->may_have_readers();
  }

  Status Store(const Step& step, std::vector<BufferRef> results, Values& values) {
    if (results.size() != step.outputs.size()) {
      return Internal("a segment of a program has an unexpected number of results.");
    }
    for (size_t i = 0; i < results.size(); ++i) {
      values[static_cast<size_t>(step.outputs[i])] = std::move(results[i]);
    }
    return {};
  }

  Status RunSegment(const Step& step, Values& values) {
    std::vector<BufferRef> inputs;
    inputs.reserve(step.inputs.size());
    for (ValueId id : step.inputs) {
      inputs.push_back(Take(step, id, values));
      inputs.back()->NoteReader();
      // A caller's buffer may be the promise of another execution; see buffer_uses.h.
      if (inputs.back()->is_owned()) continue;
      if (Status status = inputs.back()->Await(); !status.ok()) return status;
    }
    std::vector<int64_t> keep;
    if (!program_.access().host_may_overwrite) {
      keep.resize(inputs.size());
      std::iota(keep.begin(), keep.end(), 0);
    } else {
      for (int64_t position : step.donated) {
        if (!MayReuse(inputs[static_cast<size_t>(position)])) keep.push_back(position);
      }
    }
    Result<std::vector<BufferRef>> results = program_.segment(step.index).Execute(inputs, keep);
    if (!results.ok()) return results.status();
    return Store(step, std::move(*results), values);
  }

  Status RunCall(const Step& step, Values& values) {
    const PlannedCall& call = program_.plan().calls[step.index];
    const bool is_native = program_.is_native(step.index);
    const HostAccess& accesses = program_.access();
    const BufferAccess& access = is_native ? *accesses.native : *accesses.memory;
    const Device& device = program_.device();
    std::vector<CallMemory> operands(step.inputs.size());
    std::vector<void*> operand_pointers(step.inputs.size(), nullptr);
    for (size_t i = 0; i < step.inputs.size(); ++i) {
      if (step.inputs[i] == kNoValue) continue;
      const BufferRef buffer = Take(step, step.inputs[i], values);
      Result<CallMemory> memory = access.Read(device, buffer, call.spec.operands[i]);
      if (!memory.ok()) return memory.status();
      operands[i] = std::move(*memory);
      operand_pointers[i] = operands[i].data;
    }
    std::vector<CallMemory> results(step.outputs.size());
    std::vector<void*> result_pointers(step.outputs.size(), nullptr);
    for (const auto& [operand, result] : call.aliases) {
      const int64_t size_bytes = call.spec.operands[operand].size_bytes();
      CallMemory& source = operands[operand];
      if (source.may_hold_result && MayOverwrite(source.buffer)) {
        results[result] = std::move(source);
      } else {
        Result<CallMemory> memory = access.NewResult(device, call.spec.results[result]);
        if (!memory.ok()) return memory.status();
        if (size_bytes > 0) {  // else the addresses may be null
          std::memcpy(memory->data, source.data, static_cast<size_t>(size_bytes));
        }
        results[result] = std::move(*memory);
      }
      // In and out are one memory, as XLA does it.
      operand_pointers[operand] = result_pointers[result] = results[result].data;
    }
    for (size_t i = 0; i < step.outputs.size(); ++i) {
      if (step.outputs[i] == kNoValue || result_pointers[i] != nullptr) continue;
      Result<CallMemory> memory = access.NewResult(device, call.spec.results[i]);
      if (!memory.ok()) return memory.status();
      results[i] = std::move(*memory);
      result_pointers[i] = results[i].data;
    }
    num_calls_run.fetch_add(1, std::memory_order_relaxed);
    const CustomCall& custom_call = program_.call(step.index);
    const Status status =
        is_native ? custom_call.ExecuteNative(operand_pointers, result_pointers, context_)
                  : custom_call.Execute(operand_pointers, result_pointers, context_);
    if (!status.ok()) return status;
    operands.clear();  // their references; the handler is done with them
    for (size_t i = 0; i < step.outputs.size(); ++i) {
      if (step.outputs[i] == kNoValue) continue;
      Result<BufferRef> buffer = access.Finish(device, call.spec.results[i], std::move(results[i]));
      if (!buffer.ok()) return buffer.status();
      values[static_cast<size_t>(step.outputs[i])] = std::move(*buffer);
    }
    return {};
  }

  Status RunWhile(const Step& step, Values& values) {
    std::vector<BufferRef> captures;
    std::vector<BufferRef> carry;
    for (size_t i = 0; i < step.inputs.size(); ++i) {
      std::vector<BufferRef>& target = i < step.num_captures ? captures : carry;
      target.push_back(Take(step, step.inputs[i], values));
    }
    for (;;) {
      std::vector<BufferRef> inputs = captures;
      inputs.insert(inputs.end(), carry.begin(), carry.end());
      Result<std::vector<BufferRef>> condition = RunBlock(step.blocks[0], inputs);
      if (!condition.ok()) return condition.status();
      Result<int64_t> goes_on = ReadScalar<uint8_t>(condition->front());
      if (!goes_on.ok()) return goes_on.status();
      if (*goes_on == 0) return Store(step, std::move(carry), values);
      // The carry moves into the body, which may then reuse its memory.
      inputs = captures;
      std::move(carry.begin(), carry.end(), std::back_inserter(inputs));
      Result<std::vector<BufferRef>> next = RunBlock(step.blocks[1], std::move(inputs));
      if (!next.ok()) return next.status();
      carry = std::move(*next);
    }
  }

  Status RunBranch(const Step& step, Values& values) {
    const BufferRef selector = Take(step, step.inputs[0], values);
    const bool is_if = step.kind == StepKind::kIf;
    const Result<int64_t> read =
        is_if ? ReadScalar<uint8_t>(selector) : ReadScalar<int32_t>(selector);
    if (!read.ok()) return read.status();
    size_t branch = 0;
    if (is_if) {
      branch = *read != 0 ? 0 : 1;
    } else {
      // stablehlo.case: an index out of range takes the last branch.
      const size_t last = step.blocks.size() - 1;
      branch = *read < 0 ? last : std::min(static_cast<size_t>(*read), last);
    }
    std::vector<BufferRef> captures;
    for (size_t i = 1; i < step.inputs.size(); ++i) {
      captures.push_back(Take(step, step.inputs[i], values));
    }
    Result<std::vector<BufferRef>> results = RunBlock(step.blocks[branch], std::move(captures));
    if (!results.ok()) return results.status();
    return Store(step, std::move(*results), values);
  }

  template <class Value>
  Result<int64_t> ReadScalar(const BufferRef& buffer) {
    constexpr int32_t kType = sizeof(Value) == 1 ? XLA_FFI_PRED : XLA_FFI_S32;
    Result<CallMemory> memory =
        program_.access().memory->Read(program_.device(), buffer, TensorType{kType, {}});
    if (!memory.ok()) return memory.status();
    Value value;
    std::memcpy(&value, memory->data, sizeof(value));
    return static_cast<int64_t>(value);
  }

  const Program& program_;
  const ExecuteContext& context_;
};

}  // namespace

int64_t NumCallsRun() { return num_calls_run.load(std::memory_order_relaxed); }

Result<std::vector<BufferRef>> RunProgram(const Program& program, std::vector<BufferRef> arguments,
                                          const ExecuteContext& context) {
  Executor executor(program, context);
  return executor.RunBlock(0, std::move(arguments));
}

}  // namespace jfm::pjrt
