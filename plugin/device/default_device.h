// Which device the library's custom calls run on: one per build.
#pragma once

#include <string>

#include "plugin/device/device.h"

namespace jfm {

// Apple's GPU in the build for macOS, otherwise the software device. Opened once, by the
// first call; never destroyed. The error says why there is none.
Result<Device*> DefaultDevice();

// For Device::SetCacheFolder. Before the first call of DefaultDevice(): later it does nothing.
void SetDefaultDeviceCacheFolder(const std::string& folder);

}  // namespace jfm
