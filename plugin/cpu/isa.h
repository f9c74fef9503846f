// Which of the CPU kernels this machine can run, by CPUID and XGETBV.
#pragma once

#include <vector>

#include "plugin/cpu/kernels.h"

namespace jfm::cpu {

// Those that run here, the best last.
const std::vector<const Kernels*>& SupportedKernels();
// The best, or the one that ForceKernels named.
const Kernels& ChosenKernels();
// By name, for tests and benchmarks; an empty name sets the best again. false: not supported.
bool ForceKernels(const char* name);

}  // namespace jfm::cpu
