// The software Metal device: the unchanged MSL kernels, compiled for this CPU at build
// time, run with Metal's rules on a pool of threads.
#pragma once

#include "plugin/device/device.h"

namespace jfm {

// The process-wide device. Never fails, never destroyed.
Device& SoftwareDevice();

// Threads that run threadgroups (the caller of Wait() included). 0 = one per CPU of the
// process's affinity mask. Takes effect for command buffers committed afterwards.
void SetSoftwareDeviceThreads(int num_threads);

}  // namespace jfm
