// Threads that run pending executions, in the order in which they were given, several at a
// time. Made on demand, never ended.
#pragma once

#include <functional>

namespace jfm::pjrt {

// Runs `work` on another thread and returns; at once, unless kMaxPending others are not
// done yet: then it waits, so that a caller cannot run ahead without bound. On a thread of
// the queue (a handler that itself executes a program) the work is done right here,
// because the caller may be what the queue waits for.
void RunLater(std::function<void()> work);
constexpr int kMaxPending = 4;

// Until everything given so far is done. Not for threads of the queue.
void WaitUntilIdle();

}  // namespace jfm::pjrt
