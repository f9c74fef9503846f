// The entry to the CPU kernels.
#pragma once

#include <string>

#include "plugin/attention/host_problem.h"
#include "plugin/cpu/problem.h"
#include "plugin/cpu/workers.h"
#include "plugin/device/device.h"
#include "plugin/status.h"

namespace jfm::cpu {

// Checks the problem and its memory, runs it and waits.
Status Run(const Pass& pass, const HostProblem& host, Workers& workers);

// The problem as the kernels take it (problem.cc). Tensors that the pass does not have are null.
Problem MakeProblem(const Pass& pass, const HostProblem& host);

// Whether a problem is done before a helper would have woken up.
bool IsSmall(const Pass& pass, const AttentionProblem& problem);

// The kernel that a pass would run, for proofs and messages: "cpu_forward_float32_avx512".
std::string KernelName(const Pass& pass, const AttentionProblem& problem);

// What a device would say of itself, for the CPU; family: the instruction set.
DeviceFacts Facts();

}  // namespace jfm::cpu
