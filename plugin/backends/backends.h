// Where a problem is run: on the library's device or by the CPU kernels. For both callers, the
// FFI handlers and the C ABI.
#pragma once

#include "plugin/attention/host_problem.h"
#include "plugin/cpu/workers.h"
#include "plugin/status.h"

namespace jfm {

// Checks the problem and its memory, runs it on its backend, and waits. Opens no device for the
// CPU kernels: they run where there is none.
Status RunOnHost(const Pass& pass, HostProblem host, cpu::Workers& workers);

}  // namespace jfm
