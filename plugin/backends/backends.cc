#include "plugin/backends/backends.h"

#include <utility>

#include "plugin/cpu/attention.h"
#include "plugin/device/default_device.h"

namespace jfm {

Status RunOnHost(const Pass& pass, HostProblem host, cpu::Workers& workers) {
  if (host.problem.backend == Backend::kCpu) {
    cpu::Workers alone(nullptr, 1);
    const bool share = cpu::HasSetNumThreads() || !cpu::IsSmall(pass, host.problem);
    return cpu::Run(pass, host, share ? workers : alone);
  }
  Result<Device*> device = DefaultDevice();
  return device.ok() ? RunOnDevice(**device, pass, std::move(host)) : device.status();
}

}  // namespace jfm
