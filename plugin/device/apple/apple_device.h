// Apple's GPU as a Device, through the Objective-C runtime. Needs macOS 14 on an
// Apple-silicon Mac, and nothing of Apple's to build; on other systems it runs over the
// runtime that tests provide.
#pragma once

#include <memory>

#include "plugin/device/device.h"

namespace jfm {

// The process's GPU. Opened by the first call; never destroyed. The error says why there is
// none.
Result<Device*> AppleDevice();

// Another one, with its own queue and caches, for tests. Must outlive all that it made.
Result<std::unique_ptr<Device>> OpenAppleDevice();

}  // namespace jfm
