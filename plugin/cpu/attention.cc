#include "plugin/cpu/attention.h"

#include <sys/utsname.h>

#include "plugin/attention/problem_checks.h"
#include "plugin/cpu/isa.h"
#include "plugin/host_cpu.h"

namespace jfm::cpu {
namespace {

struct PassRow {
  const Pass* pass;
  const char* name;
  Outcome (*Kernels::*run)(const Problem&, Workers&);
  int products;  // of matrices
};
constexpr PassRow kPasses[] = {{&kForwardPass, "forward", &Kernels::forward, 2},
                               {&kBackwardPass, "backward", &Kernels::backward, 5},
                               {&kGradientPass, "gradient", &Kernels::gradient, 2}};

// Less than this is done before a helper has woken up, which takes some 30 us.
constexpr double kMinSharedOperations = 4e6;

const PassRow& RowOf(const Pass& pass) {
  for (const PassRow& row : kPasses) {
    if (row.pass == &pass) return row;
  }
  __builtin_unreachable();
}

}  // namespace

Status Run(const Pass& pass, const HostProblem& host, Workers& workers) {
  for (Status status : {CheckHostProblem(pass, host), CheckLimits(host.problem)}) {
    if (!status.ok()) return status;
  }
  for (size_t i : pass.Tensors(host.problem)) {
    if (!host.memory[i].is_native || host.memory[i].size_bytes == 0) continue;
    return Unimplemented(std::string(kTensors[i].name) +
                         " is an object of the device, which the "
                         "CPU kernels cannot read: use implementation=\"metal\".");
  }
  const Problem problem = MakeProblem(pass, host);
  switch ((ChosenKernels().*RowOf(pass).run)(problem, workers)) {
    case Outcome::kOk:
      return {};
    case Outcome::kOutOfMemory:
      return {Code::kResourceExhausted, "out of host memory"};
  }
  __builtin_unreachable();
}

bool IsSmall(const Pass& pass, const AttentionProblem& problem) {
  double operations = RowOf(pass).products;  // of products over all scores, hidden ones too
  for (int64_t size : problem.batch_sizes) operations *= static_cast<double>(size);
  for (int64_t size : {problem.num_heads, problem.q_len, problem.kv_len,
                       problem.head_dim + problem.value_head_dim}) {
    operations *= static_cast<double>(size);
  }
  return operations < kMinSharedOperations;
}

std::string KernelName(const Pass& pass, const AttentionProblem& problem) {
  return std::string("cpu_") + RowOf(pass).name + "_" + Name(problem.dtype) + "_" +
         ChosenKernels().name;
}

DeviceFacts Facts() {
  DeviceFacts facts;
  facts.name = CpuName();
  facts.family = ChosenKernels().name;
  utsname system;
  if (uname(&system) == 0) facts.system = std::string(system.sysname) + " " + system.release;
  facts.num_cores = static_cast<uint32_t>(NumCpus());
  return facts;
}

}  // namespace jfm::cpu
