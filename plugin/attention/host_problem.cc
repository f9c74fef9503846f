// The checks that both callers share, then wrap and run.
#include "plugin/attention/host_problem.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin/attention/attention.h"

namespace jfm {

const Pass kForwardPass = {3, 5, PlanForward};
const Pass kBackwardPass = {7, 10, PlanBackward};

namespace {

Status CheckSizes(const AttentionProblem& problem) {
  for (const SizeSpec& spec : kSizes) {
    const int64_t size = problem.*spec.size;
    if (size < spec.min) {
      return InvalidArgument(std::string(spec.name) + " must be at least " +
                             std::to_string(spec.min) + ", but got " + std::to_string(size) + ".");
    }
  }
  for (size_t i = 0; i < problem.batch_sizes.size(); ++i) {
    if (problem.batch_sizes[i] < 0) {
      return InvalidArgument("batch size " + std::to_string(i) + " must be at least 0, but got " +
                             std::to_string(problem.batch_sizes[i]) + ".");
    }
  }
  if (problem.num_heads % problem.num_kv_heads != 0) {
    return InvalidArgument("num_heads must be a multiple of num_kv_heads, but got num_heads=" +
                           std::to_string(problem.num_heads) +
                           " and num_kv_heads=" + std::to_string(problem.num_kv_heads) + ".");
  }
  return {};
}

struct Dimension {
  std::string name;
  int64_t size;
  int64_t stride;
};

std::vector<Dimension> Dimensions(const TensorSpec& spec, const AttentionProblem& problem) {
  const TensorView& view = problem.*spec.view;
  std::vector<Dimension> dimensions;
  for (size_t i = 0; i < problem.batch_sizes.size(); ++i) {
    dimensions.push_back(
        {"batch stride " + std::to_string(i), problem.batch_sizes[i], view.batch_strides[i]});
  }
  dimensions.push_back({"head stride", problem.*spec.heads, view.head_stride});
  dimensions.push_back({"row stride", problem.*spec.rows, view.row_stride});
  return dimensions;
}

// The tensor's strides must not leave its memory, and a result cannot be shared (stride 0).
Status CheckTensor(const TensorSpec& spec, const AttentionProblem& problem,
                   const HostMemory& memory, bool is_result) {
  const std::vector<Dimension> dimensions = Dimensions(spec, problem);
  for (const Dimension& dimension : dimensions) {
    if (dimension.size == 0) return {};  // no element is ever touched, strides may be 0
  }
  int64_t num_elements = spec.is_statistic() ? 1 : problem.*spec.width;
  for (const Dimension& dimension : dimensions) {
    const int64_t min_stride = is_result && dimension.size > 1 ? 1 : 0;
    if (dimension.stride < min_stride) {
      return InvalidArgument(dimension.name + " of " + spec.name + " must be at least " +
                             std::to_string(min_stride) + ", but got " +
                             std::to_string(dimension.stride) + ".");
    }
    int64_t span;
    if (__builtin_mul_overflow(dimension.size - 1, dimension.stride, &span) ||
        __builtin_add_overflow(num_elements, span, &num_elements)) {
      return InvalidArgument(std::string(spec.name) + " has more elements than 64 bits can count.");
    }
  }
  const int64_t capacity = memory.size_bytes / SizeBytes(spec.dtype(problem));
  if (memory.data == nullptr || num_elements > capacity) {
    return InvalidArgument(
        std::string(spec.name) + " must have memory for at least " + std::to_string(num_elements) +
        " " + Name(spec.dtype(problem)) + " elements, but got " +
        (memory.data == nullptr ? "a null pointer."
                                : std::to_string(memory.size_bytes) + " bytes."));
  }
  return {};
}

}  // namespace

Status RunOnHost(Device& device, const Pass& pass, HostProblem host) {
  if (Status status = CheckSizes(host.problem); !status.ok()) return status;
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (size_t i = 0; i < pass.num_tensors; ++i) {
    const HostMemory& memory = host.memory[i];
    const bool is_result = i >= pass.num_operands;
    Status status = CheckTensor(kTensors[i], host.problem, memory, is_result);
    if (!status.ok()) return status;
    const size_t size_bytes = static_cast<size_t>(memory.size_bytes);
    Result<std::unique_ptr<Buffer>> buffer =
        memory.is_native && size_bytes > 0
            ? device.WrapNative(memory.data, size_bytes)
            : device.WrapHostMemory(memory.data, size_bytes,
                                    is_result ? Access::kResult : Access::kOperand);
    if (!buffer.ok()) {
      return {buffer.status().code(),
              std::string(kTensors[i].name) + ": " + buffer.status().message()};
    }
    (host.problem.*kTensors[i].view).buffer = buffer->get();
    buffers.push_back(std::move(*buffer));
  }
  Result<Plan> plan = pass.plan(host.problem);
  return plan.ok() ? RunPlan(device, host.problem, *plan) : plan.status();
}

}  // namespace jfm
