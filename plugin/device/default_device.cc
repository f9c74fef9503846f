// The choice is the build's: JFM_DEVICE_APPLE is set for macOS (plugin/build.py), and for
// tests of the Apple layer on other systems.
#include "plugin/device/default_device.h"

#include <mutex>
#include <string>

#ifdef JFM_DEVICE_APPLE
#include "plugin/device/apple/apple_device.h"
#else
#include "plugin/device/software/software_device.h"
#endif

namespace jfm {
namespace {

std::mutex mutex;  // protects cache_folder
std::string& cache_folder = *new std::string;

Result<Device*> Open() {
#ifdef JFM_DEVICE_APPLE
  Result<Device*> device = AppleDevice();
#else
  Result<Device*> device = &SoftwareDevice();
#endif
  std::lock_guard<std::mutex> lock(mutex);
  if (device.ok() && !cache_folder.empty()) (*device)->SetCacheFolder(cache_folder);
  return device;
}

}  // namespace

Result<Device*> DefaultDevice() {
  static const Result<Device*>& device = *new Result<Device*>(Open());
  return device;
}

void SetDefaultDeviceCacheFolder(const std::string& folder) {
  std::lock_guard<std::mutex> lock(mutex);
  cache_folder = folder;
}

}  // namespace jfm
