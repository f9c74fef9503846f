// The checks of strides and memory that both callers and both backends share, then the run.
#include "plugin/attention/host_problem.h"

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin/attention/attention.h"
#include "plugin/attention/plan_context.h"
#include "plugin/attention/problem_checks.h"

namespace jfm {
namespace {

struct Dimension {
  std::string name;
  int64_t size;
  int64_t stride;
  int64_t max_stride = std::numeric_limits<int64_t>::max();
};

std::vector<Dimension> Dimensions(const TensorSpec& spec, const AttentionProblem& problem) {
  const TensorView& view = problem.*spec.view;
  std::vector<Dimension> dimensions;
  for (size_t i = 0; i < problem.batch_sizes.size(); ++i) {
    dimensions.push_back(
        {"batch stride " + std::to_string(i), problem.batch_sizes[i], view.batch_strides[i]});
  }
  for (size_t i = 0; i < spec.num_dims; ++i) {
    const DimSpec& dim = spec.dims[i];
    if (dim.stride == &TensorView::head_stride) {
      dimensions.push_back({"head stride", dim.Size(problem), view.head_stride});
    } else if (dim.stride == &TensorView::row_stride) {
      dimensions.push_back({"row stride", dim.Size(problem), view.row_stride});
    } else if (dim.stride == &TensorView::col_stride) {
      dimensions.push_back({"column stride", dim.Size(problem), view.col_stride, 1});
    } else {
      dimensions.push_back({"element stride", dim.Size(problem), 1});
    }
  }
  return dimensions;
}

// The tensor's strides must not leave its memory, and a result cannot be shared (stride 0):
// a gradient can, it is summed there.
Status CheckTensor(const TensorSpec& spec, const AttentionProblem& problem,
                   const HostMemory& memory, bool is_result) {
  const ElementSpec element = SpecOf(spec.element, problem);
  const bool may_be_shared = !is_result || spec.view == &AttentionProblem::gradient;
  int64_t num_elements = 1;
  bool is_empty = false;
  for (const Dimension& dimension : Dimensions(spec, problem)) {
    // No element is ever touched, and strides may be anything. A sum over nothing is an
    // element, though.
    if (dimension.size == 0 && !(is_result && dimension.stride == 0 && may_be_shared)) {
      is_empty = true;
    }
  }
  if (is_empty) return {};
  for (const Dimension& dimension : Dimensions(spec, problem)) {
    const int64_t min_stride = !may_be_shared && dimension.size > 1 ? 1 : 0;
    if (dimension.stride < min_stride || dimension.stride > dimension.max_stride) {
      const bool is_bounded = dimension.max_stride == 1;
      return InvalidArgument(dimension.name + " of " + spec.name + " must be " +
                             (is_bounded ? "0 or 1" : "at least " + std::to_string(min_stride)) +
                             ", but got " + std::to_string(dimension.stride) + ".");
    }
    int64_t span;
    if (__builtin_mul_overflow(dimension.size - 1, dimension.stride, &span) ||
        __builtin_add_overflow(num_elements, span, &num_elements)) {
      return InvalidArgument(std::string(spec.name) + " has more elements than 64 bits can count.");
    }
  }
  if (memory.data == nullptr || num_elements > memory.size_bytes / element.size_bytes) {
    return InvalidArgument(
        std::string(spec.name) + " must have memory for at least " + std::to_string(num_elements) +
        " " + element.name + " elements, but got " +
        (memory.data == nullptr ? "a null pointer."
                                : std::to_string(memory.size_bytes) + " bytes."));
  }
  return {};
}

}  // namespace

Status CheckHostProblem(const Pass& pass, const HostProblem& host) {
  if (Status status = CheckProblem(pass, host.problem); !status.ok()) return status;
  for (size_t i : pass.Tensors(host.problem)) {
    const Status status = CheckTensor(SpecOfTensor(i, host.problem), host.problem, host.memory[i],
                                      pass.IsResult(i));
    if (!status.ok()) return status;
  }
  return {};
}

Status RunOnDevice(Device& device, const Pass& pass, HostProblem host) {
  if (Status status = CheckHostProblem(pass, host); !status.ok()) return status;
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (size_t i : pass.Tensors(host.problem)) {
    const TensorSpec spec = SpecOfTensor(i, host.problem);
    const HostMemory& memory = host.memory[i];
    const size_t size_bytes = static_cast<size_t>(memory.size_bytes);
    Result<std::unique_ptr<Buffer>> buffer =
        memory.is_native && size_bytes > 0
            ? device.WrapNative(memory.data, size_bytes)
            : device.WrapHostMemory(memory.data, size_bytes,
                                    pass.IsResult(i) ? Access::kResult : Access::kOperand);
    if (!buffer.ok()) {
      return {buffer.status().code(), std::string(spec.name) + ": " + buffer.status().message()};
    }
    (host.problem.*spec.view).buffer = buffer->get();
    buffers.push_back(std::move(*buffer));
  }
  Result<Plan> plan = pass.plan(host.problem, CurrentContext(device.facts()));
  return plan.ok() ? RunPlan(device, host.problem, *plan) : plan.status();
}

}  // namespace jfm
