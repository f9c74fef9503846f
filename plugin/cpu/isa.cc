#include "plugin/cpu/isa.h"

#include <atomic>
#include <cstring>

#include "plugin/host_cpu.h"

namespace jfm::cpu {
namespace {

std::atomic<const Kernels*> forced{nullptr};

std::vector<const Kernels*> FindSupported() {
  std::vector<const Kernels*> found = {&kPlainKernels};
#if defined(__x86_64__)
  const CpuFeatures features = DetectCpuFeatures();
  if (features.avx2) found.push_back(&kAvx2Kernels);
  if (features.avx512) found.push_back(&kAvx512Kernels);
  if (features.avx512_bf16) found.push_back(&kAvx512Bf16Kernels);
#endif
  return found;
}

}  // namespace

const std::vector<const Kernels*>& SupportedKernels() {
  static const auto& supported = *new std::vector<const Kernels*>(FindSupported());
  return supported;
}

const Kernels& ChosenKernels() {
  const Kernels* kernels = forced.load(std::memory_order_relaxed);
  return kernels != nullptr ? *kernels : *SupportedKernels().back();
}

bool ForceKernels(const char* name) {
  const Kernels* found = nullptr;
  for (const Kernels* kernels : SupportedKernels()) {
    if (std::strcmp(kernels->name, name) == 0) found = kernels;
  }
  if (found == nullptr && name[0] != '\0') return false;
  forced.store(found, std::memory_order_relaxed);
  return true;
}

}  // namespace jfm::cpu
