// PJRT_LoadedExecutable_Execute for programs with a plan: takes the caller's buffers, runs
// the plan now or later, hands out the results.
#pragma once

#include <memory>

#include "plugin/pjrt/pjrt_api.h"
#include "plugin/pjrt/program.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// Where the host has alias buffers, returns before the work is done: errors then come with
// the results' ready events. Otherwise waits.
Status ExecuteProgram(const std::shared_ptr<const Program>& program,
                      PJRT_LoadedExecutable_Execute_Args& args);

// Executions of plans since the process started; for tests.
int64_t NumExecutions();

}  // namespace jfm::pjrt
