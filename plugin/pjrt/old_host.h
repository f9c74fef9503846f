// What the plugin answers itself where an old host (jax-metal: API 0.47) cannot: memories,
// which newer JAX insists on, host arrays at any address, copies within a device. The rest
// of such a host's table is forwarded like any other's.
#pragma once

#include <vector>

#include "plugin/pjrt/pjrt_api.h"

namespace jfm::pjrt {

struct SlotFunction {
  Slot slot;
  PJRT_Function function;
};

// To be put into the table instead of the host's. All of them take arguments of our
// caller's version and return errors of ours.
std::vector<SlotFunction> OldHostFunctions();

// The newest StableHLO that a host reads which does not say what it reads: jax-metal's.
// Not passed on to jaxlib, which then refuses programs that we can bring down to it: every
// program for an old host is rewritten at this version (jax_flash_metal/stablehlo.py).
extern const int64_t kOldHostStablehloVersion[3];

}  // namespace jfm::pjrt
