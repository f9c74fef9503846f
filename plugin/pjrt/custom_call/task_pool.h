// The threads behind the FFI's ThreadPool. Handlers may do with tasks what they like:
// wait for them, schedule more from within them, let them wait for each other.
#pragma once

namespace jfm::pjrt {

// Runs task(data) on another thread, some time soon. Never blocks, never fails.
void ScheduleTask(void (*task)(void* data), void* data);

// Tasks that run at once when none of them blocks: one per CPU.
int NumTaskThreads();

}  // namespace jfm::pjrt
