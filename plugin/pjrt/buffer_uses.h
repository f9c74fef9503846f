// Buffers of callers that pending executions still need, or have yet to make. JAX may
// delete or donate a buffer as soon as Execute has returned; the host may not, before the
// last step that reads it, nor while it is only promised.
#pragma once

#include <cstdint>
#include <vector>

#include "plugin/pjrt/pjrt_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

class Host;

// An execution begins with these arguments. `donated[i]`: from now on the caller sees
// arguments[i] as deleted. Gives those of the donated ones that the execution may overwrite:
// not those that another pending one still needs. Fails, and takes nothing, when one of
// them is deleted or given away already.
Result<std::vector<bool>> AcquireBuffers(const Host& host,
                                         const std::vector<PJRT_Buffer*>& arguments,
                                         const std::vector<bool>& donated);

// The execution is over: does what was put off until now.
void ReleaseBuffers(const Host& host, const std::vector<PJRT_Buffer*>& arguments);

// A promise is an alias buffer of the host that an execution will fulfil. Until then the
// CPU plugins (0.106 and 0.115) abort when asked for its memory. And they run programs in
// the order in which they are given: one that waits for a promise would hold up those that
// are to fulfil it. So no program of the host may get a promise.
using PromiseId = int64_t;
PromiseId NotePromise(PJRT_Buffer* buffer);
void PromiseIsKept(PromiseId id);

// What the caller asks of a buffer. True: done, or put off; false: the host's affair.
bool DeleteLater(PJRT_Buffer* buffer);
bool DestroyLater(PJRT_Buffer* buffer);
bool IsGivenAway(PJRT_Buffer* buffer);

// Before the host itself uses arguments: refuses those that are given away, waits for those
// that are promised and, where they may be overwritten, for the executions that need them.
Status PrepareForHost(PJRT_Buffer* const* arguments, size_t num_arguments, bool may_overwrite);

}  // namespace jfm::pjrt
