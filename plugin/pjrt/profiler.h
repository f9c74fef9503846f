// The profiler that a plugin may offer in its chain of extensions. Ours records nothing: it
// is there for jaxlib 0.4.34, which crashes in jax.profiler.trace when a plugin has none.
#pragma once

#include "plugin/pjrt/pjrt_api.h"

namespace jfm::pjrt {

// A node to be linked in front of `next`, where the host has no profiler; else `next`. It
// lives as long as the process. To be called once.
PJRT_Extension* WithProfiler(PJRT_Extension* next);

}  // namespace jfm::pjrt
