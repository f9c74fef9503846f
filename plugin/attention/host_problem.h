// An attention problem whose tensors are the caller's: what both callers, the FFI handlers
// and the C ABI, fill in. Checks it, for any backend; wraps the memory and runs it on a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plugin/attention/planner.h"
#include "plugin/attention/problem.h"
#include "plugin/attention/tensors.h"
#include "plugin/device/device.h"
#include "plugin/status.h"

namespace jfm {

struct HostMemory {
  void* data = nullptr;  // may be null when there are no bytes
  int64_t size_bytes = 0;
  bool is_native = false;  // `data` is an object of the device, not an address
};

struct HostProblem {
  AttentionProblem problem;                        // its views have strides, but no buffers yet
  std::array<HostMemory, kTensors.size()> memory;  // parallel to kTensors
};

// Checks the problem, and that each tensor's strides stay within its memory.
Status CheckHostProblem(const Pass& pass, const HostProblem& host);

// The same, then runs it on the device, whatever its backend is, and waits.
Status RunOnDevice(Device& device, const Pass& pass, HostProblem host);

}  // namespace jfm
