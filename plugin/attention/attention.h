// What the layers above ask for. Plans, allocates scratch, encodes, waits.
#pragma once

#include "plugin/attention/problem.h"
#include "plugin/device/device.h"

namespace jfm {

Status RunForward(Device& device, const AttentionProblem& problem);
Status RunBackward(Device& device, const AttentionProblem& problem);

// Only gets the pipelines that a run would need, so that it need not wait for a compiler.
Status CompileForward(Device& device, const AttentionProblem& problem);
Status CompileBackward(Device& device, const AttentionProblem& problem);

}  // namespace jfm
