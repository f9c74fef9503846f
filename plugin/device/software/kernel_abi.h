// The table of kernels that the build generates (frontend registry()). What kernels are
// called with, and what they call, is in frontend/msl_abi.h.
#pragma once

#include <cstddef>

#include "plugin/device/software/frontend/msl_abi.h"

namespace jfm {

constexpr unsigned kMaxFunctionConstants = 32;

using KernelEntry = void (*)(const MslThread* thread);

struct SoftwareKernel {
  const char* host_name;
  KernelEntry entry;
};
extern const SoftwareKernel kSoftwareKernels[];
extern const size_t kNumSoftwareKernels;

}  // namespace jfm
