// Runs a plan on a device: scratch, pipelines, encoding, waiting.
#include "plugin/attention/attention.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

namespace jfm {
namespace {

// A kernel that has nothing to read still gets a buffer to bind.
constexpr int64_t kMinScratchBytes = 16;

struct BoundOperand {
  const Buffer* buffer;
  uint64_t offset_bytes;
  int64_t element_bytes;  // of scratch, which never has an offset: 0
};

}  // namespace

Status RunPlan(Device& device, const AttentionProblem& p, const Plan& plan) {
  if (plan.launches.empty()) return {};
  std::array<bool, kNumOperands> is_bound{};
  for (const Launch& launch : plan.launches) {
    for (const Binding& binding : launch.bindings) is_bound[Index(binding.operand)] = true;
  }
  std::array<BoundOperand, kNumOperands> operands;  // in the order of Operand
  for (size_t i = 0; i < kTensors.size(); ++i) {
    const TensorSpec spec = SpecOfTensor(i, p);
    const TensorView& view = p.*spec.view;
    operands[i] = {view.buffer, view.offset_bytes, SpecOf(spec.element, p).size_bytes};
  }
  std::array<std::unique_ptr<Buffer>, kNumScratch> scratch;
  for (size_t i = 0; i < kNumScratch; ++i) {
    if (!is_bound[kNumTensors + i]) continue;
    const int64_t size_bytes = std::max(plan.scratch_bytes[i], kMinScratchBytes);
    Result<std::unique_ptr<Buffer>> buffer =
        device.AllocateScratch(static_cast<size_t>(size_bytes));
    if (!buffer.ok()) return buffer.status();
    scratch[i] = std::move(*buffer);
    operands[kNumTensors + i] = {scratch[i].get(), 0, 0};
  }

  std::unique_ptr<CommandBuffer> commands = device.NewCommandBuffer();
  for (const Launch& launch : plan.launches) {
    Result<const Pipeline*> pipeline =
        device.GetPipeline(launch.variant->host_name, launch.constants);
    if (!pipeline.ok()) return pipeline.status();
    Dispatch dispatch;
    dispatch.pipeline = *pipeline;
    for (const Binding& binding : launch.bindings) {
      const size_t i = Index(binding.operand);
      const BoundOperand& operand = operands[i];
      const int64_t offset = launch.offsets[i] * operand.element_bytes;
      dispatch.buffers.push_back({static_cast<uint32_t>(binding.index), operand.buffer,
                                  operand.offset_bytes + static_cast<uint64_t>(offset)});
    }
    dispatch.bytes.push_back({JFM_BUFFER_PARAMS, &launch.params, sizeof(launch.params)});
    dispatch.threadgroups = launch.threadgroups;
    dispatch.threads_per_threadgroup = launch.threads_per_threadgroup;
    dispatch.work = launch.work;
    if (Status status = commands->Encode(dispatch); !status.ok()) return status;
  }
  if (Status status = commands->Commit(); !status.ok()) return status;
  return commands->Wait();
}

Status CompilePlan(Device& device, const Plan& plan) {
  for (const Launch& launch : plan.launches) {
    Result<const Pipeline*> pipeline =
        device.GetPipeline(launch.variant->host_name, launch.constants);
    if (!pipeline.ok()) return pipeline.status();
  }
  return {};
}

}  // namespace jfm
