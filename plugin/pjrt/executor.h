// Runs a loaded plan once: segments by the host, calls by their handlers, loops and
// branches by reading their conditions. Frees every buffer at its last use.
#pragma once

#include <vector>

#include "plugin/pjrt/program.h"

namespace jfm::pjrt {

// On the calling thread, which waits wherever a handler or a condition needs a value. The
// results are buffers of their own, owned, but perhaps not written yet.
Result<std::vector<BufferRef>> RunProgram(const Program& program, std::vector<BufferRef> arguments,
                                          const ExecuteContext& context);

// Custom calls run since the process started; for tests.
int64_t NumCallsRun();

}  // namespace jfm::pjrt
