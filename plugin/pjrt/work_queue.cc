// One queue, one lock. An execution waits only for results of earlier ones, which have a
// thread already, so that executions cannot block each other.
#include "plugin/pjrt/work_queue.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace jfm::pjrt {
namespace {

thread_local bool is_worker = false;

struct Queue {
  std::mutex mutex;  // guards everything here
  std::condition_variable has_work;
  std::condition_variable is_done;
  std::deque<std::function<void()>> work;
  int num_threads = 0;
  int num_idle = 0;
  int num_pending = 0;  // waiting or running
};
// Never destroyed: its threads may outlive main().
Queue& queue = *new Queue;

void WorkerLoop() {
  is_worker = true;
  std::unique_lock<std::mutex> lock(queue.mutex);
  for (;;) {
    ++queue.num_idle;
    queue.has_work.wait(lock, [] { return !queue.work.empty(); });
    --queue.num_idle;
    std::function<void()> work = std::move(queue.work.front());
    queue.work.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // its destructor may free buffers: not under the lock
    lock.lock();
    --queue.num_pending;
    queue.is_done.notify_all();
  }
}

}  // namespace

void RunLater(std::function<void()> work) {
  if (is_worker) return work();
  std::unique_lock<std::mutex> lock(queue.mutex);
  queue.is_done.wait(lock, [] { return queue.num_pending < kMaxPending; });
  ++queue.num_pending;
  queue.work.push_back(std::move(work));
  if (queue.num_idle < static_cast<int>(queue.work.size()) && queue.num_threads < kMaxPending) {
    try {
      std::thread(WorkerLoop).detach();
      ++queue.num_threads;
    } catch (const std::system_error&) {
      // The system has no more threads to give: those that there are do, or this one.
      if (queue.num_threads == 0) {
        work = std::move(queue.work.back());
        queue.work.pop_back();
        --queue.num_pending;
        lock.unlock();
        return work();
      }
    }
  }
  queue.has_work.notify_one();
}

void WaitUntilIdle() {
  std::unique_lock<std::mutex> lock(queue.mutex);
  queue.is_done.wait(lock, [] { return queue.num_pending == 0; });
}

}  // namespace jfm::pjrt
