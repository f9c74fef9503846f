// Why no use of the pool can deadlock in the pool: a queued task starts when a worker is
// free, and while the queue is not empty and nothing starts for kPatience, the watcher
// adds a worker. So every task starts after a finite time, whatever the running ones
// wait for, and the calls of handlers themselves never occupy a worker. (XLA's pool has a
// fixed size and runs the handlers too: there, many handlers that wait for their tasks
// stop each other.) Workers beyond one per CPU leave when they have nothing to do.
#include "plugin/pjrt/custom_call/task_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace jfm::pjrt {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(2);

struct Task {
  void (*function)(void*);
  void* data;
};

class TaskPool {
 public:
  // Never destroyed: workers sleep in it when the process ends. A child of fork() has
  // none of the threads and gets a pool of its own.
  static TaskPool& Get() {
    static std::atomic<TaskPool*> current{nullptr};
    TaskPool* pool = current.load(std::memory_order_acquire);
    if (pool != nullptr && pool->process_ == getpid()) return *pool;
    auto* const fresh = new TaskPool;
    if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was faster
    return *pool;
  }

  void Schedule(Task task) {
    std::unique_lock<std::mutex> lock(mutex_);
    queue_.push_back(task);
    if (num_idle_ >= static_cast<int>(queue_.size())) {
      work_.notify_one();
    } else if (num_workers_ < NumTaskThreads()) {
      AddWorker();
    }
    if (!has_watcher_) has_watcher_ = Start([this] { Watch(); });
    if (num_workers_ == 0) {
      // No threads to be had at all: better here than never.
      queue_.pop_back();
      lock.unlock();
      task.function(task.data);
      return;
    }
    stalled_.notify_one();
  }

 private:
  // False when the system has no more threads to give.
  template <class Function>
  static bool Start(Function function) {
    try {
      std::thread(function).detach();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  void AddWorker() {
    if (Start([this] { Work(); })) ++num_workers_;
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (queue_.empty()) {
        if (num_workers_ > NumTaskThreads()) break;
        ++num_idle_;
        work_.wait(lock, [this] { return !queue_.empty(); });
        --num_idle_;
      }
      const Task task = queue_.front();
      queue_.pop_front();
      ++num_started_;
      lock.unlock();
      task.function(task.data);
      lock.lock();
    }
    --num_workers_;
  }

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      stalled_.wait(lock, [this] { return !queue_.empty(); });
      const uint64_t started = num_started_;
      lock.unlock();
      std::this_thread::sleep_for(kPatience);
      lock.lock();
      if (!queue_.empty() && num_started_ == started) AddWorker();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;  // protects all below
  std::condition_variable work_;
  std::condition_variable stalled_;
  std::deque<Task> queue_;
  uint64_t num_started_ = 0;
  int num_workers_ = 0;
  int num_idle_ = 0;  // waiting for work_
  bool has_watcher_ = false;
};

}  // namespace

void ScheduleTask(void (*task)(void* data), void* data) { TaskPool::Get().Schedule({task, data}); }

int NumTaskThreads() {
  static const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return count;
}

}  // namespace jfm::pjrt
