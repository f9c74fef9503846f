// Between the compiled kernels and the runtime: entry points, lane values, the table of
// kernels that the build generates (frontend registry()). The functions that kernels call
// are declared in frontend/msl_shim.h and defined in threadgroup.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jfm {

struct LanePosition {
  uint32_t x, y, z;
};

// The same layout as __msl_ids in frontend/msl_shim.h.
struct LaneIds {
  LanePosition threadgroup, threadgroups, thread, threads, position;
  uint32_t lane, simdgroup, index, simd_width;
};
static_assert(sizeof(LaneIds) == 19 * 4, "layout shared with msl_shim.h");

constexpr uint32_t kMaxBuffers = 31;
constexpr uint32_t kMaxFunctionConstants = 32;
constexpr uint32_t kSimdWidth = 32;

// `buffers` has kMaxBuffers addresses.
using KernelEntry = void (*)(const uint64_t* buffers, const LaneIds* ids);

struct SoftwareKernel {
  const char* host_name;
  KernelEntry entry;
};
extern const SoftwareKernel kSoftwareKernels[];
extern const size_t kNumSoftwareKernels;

}  // namespace jfm
