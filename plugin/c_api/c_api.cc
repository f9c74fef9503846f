// Turns the C structs into a HostProblem and a Status into a code with text.
#include "plugin/c_api/c_api.h"

#include <array>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "plugin/attention/attention.h"
#include "plugin/attention/choices.h"
#include "plugin/attention/host_problem.h"
#include "plugin/attention/plan_context.h"
#include "plugin/attention/plan_json.h"
#include "plugin/attention/problem_checks.h"
#include "plugin/backends/backends.h"
#include "plugin/c_api/thread_helpers.h"
#include "plugin/c_boundary.h"
#include "plugin/cpu/attention.h"
#include "plugin/cpu/isa.h"
#include "plugin/device/default_device.h"
#ifndef JFM_DEVICE_APPLE
#include "plugin/device/software/software_device.h"
#endif

namespace jfm {
namespace {

static_assert(JFM_MAX_TENSOR_BATCH_DIMS == kMaxBatchDims, "the arrays of the C ABI");
static_assert(sizeof(JfmTensor) == 176 && sizeof(JfmAttentionProblem) == 4296, "the C ABI");

#ifdef JFM_DEVICE_APPLE
constexpr const char* kDeviceKind = "apple";
#else
constexpr const char* kDeviceKind = "software";
#endif

// Parallel to kTensors.
using TensorMember = JfmTensor JfmAttentionProblem::*;
constexpr std::array<TensorMember, kTensors.size()> kTensorMembers = {
    &JfmAttentionProblem::query,
    &JfmAttentionProblem::key,
    &JfmAttentionProblem::value,
    &JfmAttentionProblem::bias,
    &JfmAttentionProblem::mask,
    &JfmAttentionProblem::q_offsets,
    &JfmAttentionProblem::q_segment_ids,
    &JfmAttentionProblem::kv_segment_ids,
    &JfmAttentionProblem::query_seq_lengths,
    &JfmAttentionProblem::key_value_seq_lengths,
    &JfmAttentionProblem::sinks,
    &JfmAttentionProblem::alibi_slopes,
    &JfmAttentionProblem::dropout_key,
    &JfmAttentionProblem::dropout_batch_indices,
    &JfmAttentionProblem::dropout_head_indices,
    &JfmAttentionProblem::out,
    &JfmAttentionProblem::logsumexp,
    &JfmAttentionProblem::dout,
    &JfmAttentionProblem::dlogsumexp,
    &JfmAttentionProblem::dquery,
    &JfmAttentionProblem::dkey,
    &JfmAttentionProblem::dvalue,
    &JfmAttentionProblem::gradient,
};

Status CheckRange(const std::string& name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return {};
  return InvalidArgument(name + " must be from " + std::to_string(min) + " to " +
                         std::to_string(max) + ", but got " + std::to_string(value) + ".");
}

Result<HostProblem> Decode(const JfmAttentionProblem& source, const Pass& pass) {
  for (Status status :
       {CheckRange("dtype", source.dtype, JFM_FLOAT32, JFM_BFLOAT16),
        CheckRange("num_batch_dims", source.num_batch_dims, 0, kMaxBatchDims),
        CheckRange("is_causal", source.is_causal, 0, 1),
        CheckRange("operands", source.operands, 0, (1 << kNumOptional) - 1),
        CheckRange("bias_dtype", source.bias_dtype, JFM_FLOAT32, JFM_BFLOAT16),
        CheckRange("gradient_of", source.gradient_of, JFM_OF_BIAS, JFM_OF_ALIBI_SLOPES),
        CheckRange("backend", source.backend, JFM_METAL, JFM_CPU)}) {
    if (!status.ok()) return status;
  }
  HostProblem host;
  AttentionProblem& problem = host.problem;
  problem.backend = static_cast<Backend>(source.backend);
  problem.dtype = static_cast<Dtype>(source.dtype);
  problem.batch_sizes.assign(source.batch_sizes, source.batch_sizes + source.num_batch_dims);
  problem.q_len = source.q_len;
  problem.kv_len = source.kv_len;
  problem.num_heads = source.num_heads;
  problem.num_kv_heads = source.num_kv_heads;
  problem.head_dim = source.head_dim;
  problem.value_head_dim = source.value_head_dim;
  problem.scale = source.scale;
  problem.is_causal = source.is_causal != 0;
  problem.q_offset = source.q_offset;
  problem.window_left = source.window_left;
  problem.window_right = source.window_right;
  problem.logits_soft_cap = source.logits_soft_cap;
  problem.dropout_rate = source.dropout_rate;
  problem.bias_dtype = static_cast<Dtype>(source.bias_dtype);
  problem.gradient_of = static_cast<GradientOf>(source.gradient_of);
  SetGiven(problem, source.operands);
  for (size_t i : pass.Tensors(problem)) {
    const JfmTensor& tensor = source.*kTensorMembers[i];
    const std::string name = kTensors[i].name;
    if (tensor.num_batch_dims != source.num_batch_dims) {
      return InvalidArgument("num_batch_dims of " + name + " must be the problem's, " +
                             std::to_string(source.num_batch_dims) + ", but got " +
                             std::to_string(tensor.num_batch_dims) + ".");
    }
    if (tensor.size_bytes < 0) {
      return InvalidArgument("size_bytes of " + name + " must be at least 0, but got " +
                             std::to_string(tensor.size_bytes) + ".");
    }
    TensorView& view = problem.*kTensors[i].view;
    view.batch_strides.assign(tensor.batch_strides, tensor.batch_strides + tensor.num_batch_dims);
    // Only of dimensions that it has: nobody looks at what stands in the others.
    const TensorSpec spec = SpecOfTensor(i, problem);
    for (size_t d = 0; d < spec.num_dims; ++d) {
      const auto stride = spec.dims[d].stride;
      if (stride == &TensorView::head_stride) view.head_stride = tensor.head_stride;
      if (stride == &TensorView::row_stride) view.row_stride = tensor.row_stride;
      if (stride == &TensorView::col_stride) view.col_stride = tensor.col_stride;
    }
    host.memory[i] = {tensor.data, tensor.size_bytes};
  }
  return host;
}

void CopyText(const std::string& source, char* text, size_t size) {
  if (text != nullptr && size > 0) std::snprintf(text, size, "%s", source.c_str());
}

// In the order of JfmPass.
constexpr const Pass* kPasses[] = {&kForwardPass, &kBackwardPass, &kGradientPass};

int Run(const Pass& pass, const JfmAttentionProblem* problem, char* error,
        size_t error_size) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    if (problem == nullptr) return InvalidArgument("problem is a null pointer.");
    Result<HostProblem> host = Decode(*problem, pass);
    if (!host.ok()) return host.status();
    ThreadHelpers helpers;
    cpu::Workers workers(&helpers, cpu::NumThreads());
    return RunOnHost(pass, std::move(*host), workers);
  });
  CopyText(status.message(), error, error_size);
  return static_cast<int>(status.code());
}

// A problem without its memory, and its pass.
struct Question {
  const Pass* pass;
  AttentionProblem problem;
};

Result<Question> DecodeQuestion(int number, const JfmAttentionProblem* problem) {
  if (problem == nullptr) return InvalidArgument("problem is a null pointer.");
  if (Status status = CheckRange("pass", number, JFM_FORWARD, JFM_GRADIENT); !status.ok()) {
    return status;
  }
  const Pass& pass = *kPasses[number];
  Result<HostProblem> host = Decode(*problem, pass);
  if (!host.ok()) return host.status();
  for (Status status : {CheckProblem(pass, host->problem), CheckLimits(host->problem)}) {
    if (!status.ok()) return status;
  }
  return Question{&pass, std::move(host->problem)};
}

// Of a plan that is not run: where there is no device, as for one of an unknown family.
PlanContext ContextWithoutRun() {
  if (HasSetGpuFamily()) return CurrentContext({});
  Result<Device*> device = DefaultDevice();
  return CurrentContext(device.ok() ? (*device)->facts() : DeviceFacts{});
}

int Compile(int pass, const JfmAttentionProblem* problem, char* error, size_t error_size) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    Result<Question> question = DecodeQuestion(pass, problem);
    if (!question.ok()) return question.status();
    if (question->problem.backend == Backend::kCpu) return {};
    Result<Plan> plan = question->pass->plan(question->problem, ContextWithoutRun());
    if (!plan.ok()) return plan.status();
    Result<Device*> device = DefaultDevice();
    return device.ok() ? CompilePlan(**device, *plan) : device.status();
  });
  CopyText(status.message(), error, error_size);
  return static_cast<int>(status.code());
}

int WritePlan(int pass, const JfmAttentionProblem* problem, char* text,
              size_t text_size) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    Result<Question> question = DecodeQuestion(pass, problem);
    if (!question.ok()) return question.status();
    const AttentionProblem& p = question->problem;
    PlanText plan_text;
    if (p.backend == Backend::kCpu) {
      plan_text = DescribeKernel(p, cpu::KernelName(*question->pass, p));
    } else {
      const PlanContext context = ContextWithoutRun();
      Result<Plan> plan = question->pass->plan(p, context);
      if (!plan.ok()) return plan.status();
      plan_text = DescribePlan(p, context.gpu_family, *plan, text_size);
    }
    return {plan_text.needed > 0 ? Code::kOutOfRange : Code::kOk, plan_text.json};
  });
  CopyText(status.message(), text, text_size);
  return static_cast<int>(status.code());
}

int SetKernelChoices(const char* text, char* error, size_t error_size) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    Result<Choices> choices = Choices::Parse(text != nullptr ? text : "");
    if (!choices.ok()) return choices.status();
    SetChoices(std::move(*choices));
    return {};
  });
  CopyText(status.message(), error, error_size);
  return static_cast<int>(status.code());
}

Result<DeviceFacts> FactsOf(int backend) {
  if (Status status = CheckRange("backend", backend, JFM_METAL, JFM_CPU); !status.ok()) {
    return status;
  }
  if (backend == JFM_CPU) return cpu::Facts();
  Result<Device*> device = DefaultDevice();
  if (!device.ok()) return device.status();
  return (*device)->facts();
}

int DescribeDevice(int backend, char* text, size_t text_size) noexcept {
  std::string lines;
  const Status status = WithoutExceptions([&]() -> Status {
    Result<DeviceFacts> found = FactsOf(backend);
    if (!found.ok()) return found.status();
    const DeviceFacts& facts = *found;
    const std::pair<const char*, std::string> rows[] = {
        {"device", backend == JFM_CPU ? "cpu" : kDeviceKind},
        {"name", facts.name},
        {"family", facts.family},
        {"system", facts.system},
        {"num_cores", std::to_string(facts.num_cores)},
        {"max_threadgroup_memory_bytes", std::to_string(facts.max_threadgroup_memory_bytes)},
        {"max_threads_per_threadgroup", std::to_string(facts.max_threads_per_threadgroup)},
        {"max_buffer_bytes", std::to_string(facts.max_buffer_bytes)},
        {"memory_limit_bytes", std::to_string(facts.memory_limit_bytes)},
        {"has_unified_memory", std::to_string(facts.has_unified_memory)},
    };
    for (const auto& [key, value] : rows) lines += std::string(key) + "=" + value + "\n";
    return {};
  });
  CopyText(status.ok() ? lines : status.message(), text, text_size);
  return static_cast<int>(status.code());
}

int ListIsas(char* text, size_t text_size) noexcept {
  std::string lines;
  const Status status = WithoutExceptions([&]() -> Status {
    for (const cpu::Kernels* kernels : cpu::SupportedKernels()) {
      lines += std::string(kernels->name) + "\n";
    }
    return {};
  });
  CopyText(status.ok() ? lines : status.message(), text, text_size);
  return static_cast<int>(status.code());
}

int SetIsa(const char* name) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    if (cpu::ForceKernels(name != nullptr ? name : "")) return {};
    return {Code::kNotFound, "no such instruction set"};
  });
  return static_cast<int>(status.code());
}

double MeasurePeak(int dtype) noexcept {
  double peak = 0;
  (void)WithoutExceptions([&]() -> Status {
    if (Status status = CheckRange("dtype", dtype, JFM_FLOAT32, JFM_BFLOAT16); !status.ok()) {
      return status;
    }
    peak = cpu::ChosenKernels().measure_peak(static_cast<Dtype>(dtype));
    return {};
  });
  return peak;
}

}  // namespace
}  // namespace jfm

extern "C" {

JFM_EXPORT const char* jfm_version(void) { return JFM_VERSION; }

JFM_EXPORT int jfm_abi_version(void) { return JFM_ABI_VERSION; }

JFM_EXPORT int jfm_attention_forward(const JfmAttentionProblem* problem, char* error,
                                     size_t error_size) {
  return jfm::Run(jfm::kForwardPass, problem, error, error_size);
}

JFM_EXPORT int jfm_attention_backward(const JfmAttentionProblem* problem, char* error,
                                      size_t error_size) {
  return jfm::Run(jfm::kBackwardPass, problem, error, error_size);
}

JFM_EXPORT int jfm_attention_gradient(const JfmAttentionProblem* problem, char* error,
                                      size_t error_size) {
  return jfm::Run(jfm::kGradientPass, problem, error, error_size);
}

JFM_EXPORT int jfm_attention_plan(const JfmAttentionProblem* problem, int pass, char* text,
                                  size_t text_size) {
  return jfm::WritePlan(pass, problem, text, text_size);
}

JFM_EXPORT int jfm_attention_compile(const JfmAttentionProblem* problem, int pass, char* error,
                                     size_t error_size) {
  return jfm::Compile(pass, problem, error, error_size);
}

JFM_EXPORT int jfm_device_facts(int backend, char* text, size_t text_size) {
  return jfm::DescribeDevice(backend, text, text_size);
}

JFM_EXPORT void jfm_set_cache_folder(const char* folder) {
  (void)jfm::WithoutExceptions([&]() -> jfm::Status {
    jfm::SetDefaultDeviceCacheFolder(folder != nullptr ? folder : "");
    return {};
  });
}

JFM_EXPORT void jfm_set_threads(int num_threads) {
  jfm::cpu::SetNumThreads(num_threads);
#ifndef JFM_DEVICE_APPLE
  jfm::SetSoftwareDeviceThreads(num_threads);
#endif
}

JFM_EXPORT int jfm_set_kernel_choices(const char* text, char* error, size_t error_size) {
  return jfm::SetKernelChoices(text, error, error_size);
}

JFM_EXPORT void jfm_set_gpu_family(int family) { jfm::SetGpuFamily(family); }

JFM_EXPORT void jfm_set_score_gradient_limit(int64_t bytes) { jfm::SetScoreGradientLimit(bytes); }

JFM_EXPORT void jfm_set_max_launch_work(double operations) { jfm::SetMaxLaunchWork(operations); }

JFM_EXPORT int jfm_cpu_isas(char* text, size_t text_size) { return jfm::ListIsas(text, text_size); }

JFM_EXPORT int jfm_cpu_set_isa(const char* name) { return jfm::SetIsa(name); }

JFM_EXPORT double jfm_cpu_measure_peak(int dtype) { return jfm::MeasurePeak(dtype); }

}  // extern "C"
