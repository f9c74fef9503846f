// Buffers of callers that pending executions still need. JAX may delete or donate a buffer
// as soon as Execute has returned; the host may not, before the last step that reads it.
#pragma once

#include <vector>

#include "plugin/pjrt/pjrt_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

class Host;

// An execution begins with these arguments. `donated[i]`: from now on the caller sees
// arguments[i] as deleted. Fails, and takes nothing, when one of them is given away already.
Status AcquireBuffers(const std::vector<PJRT_Buffer*>& arguments, const std::vector<bool>& donated);

// The execution is over: does what was put off until now.
void ReleaseBuffers(const Host& host, const std::vector<PJRT_Buffer*>& arguments);

// What the caller asks of a buffer. True: done, or put off; false: the host's affair.
bool DeleteLater(PJRT_Buffer* buffer);
bool DestroyLater(PJRT_Buffer* buffer);
bool IsGivenAway(PJRT_Buffer* buffer);

// Before the host itself executes: refuses arguments that are given away; where the program
// may overwrite its arguments, waits until no pending execution needs them.
Status PrepareForHost(PJRT_Buffer* const* arguments, size_t num_arguments, bool may_overwrite);

}  // namespace jfm::pjrt
