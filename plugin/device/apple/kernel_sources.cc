// Looks kernels up in the generated table.
#include "plugin/device/apple/kernel_sources.h"

namespace jfm::apple {
namespace {
#include "kernel_sources.inc"
}  // namespace

const MslKernel* FindMslKernel(const std::string& host_name) {
  for (const MslKernel& kernel : kMslKernels) {
    if (host_name == kernel.host_name) return &kernel;
  }
  return nullptr;
}

std::string MslText(const MslKernel& kernel) {
  return std::string(kMslSources[kernel.source].text) + kernel.instantiation;
}

std::string MslDigest() { return kMslDigest; }

}  // namespace jfm::apple
