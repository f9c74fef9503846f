// Keeps C++ exceptions of foreign code out of ours. A handler comes with its own C++
// runtime, so `catch` alone does not do: see the .cc.
#pragma once

#include "plugin/status.h"

namespace jfm::pjrt {

// Calls function(argument) and stores what it returns. An exception becomes an Internal
// status with its type and message (ResourceExhausted for std::bad_alloc).
Status CallWithBarrier(void* (*function)(void*), void* argument, void** result);

}  // namespace jfm::pjrt
