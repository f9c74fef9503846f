#include "plugin/device/software/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "plugin/host_cpu.h"

namespace jfm {
namespace {

struct Job {
  uint64_t count;
  const std::function<bool(uint64_t)>* work;  // valid while a participant is active
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::condition_variable idle;
  int active = 0;       // helpers inside Run
  bool closed = false;  // no helper may start any more

  void Run() {
    for (uint64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      if (!(*work)(i)) next.store(count, std::memory_order_relaxed);
    }
  }
};

class Pool {
 public:
  // Never destroyed: helpers may still sleep in it when the process ends. The child of a
  // fork() has none of them, and a mutex that one of them held stays locked there: it
  // leaves that pool alone and starts another.
  static Pool& Get() {
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { current_ = nullptr; });
    Pool* pool = current_;
    if (pool == nullptr) {
      auto* fresh = new Pool;
      if (current_.compare_exchange_strong(pool, fresh)) return *fresh;
      delete fresh;
    }
    return *pool;
  }

  // Lets up to `helpers` threads join the job.
  void Offer(const std::shared_ptr<Job>& job, int helpers) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (; num_threads_ < helpers; ++num_threads_) std::thread([this] { Help(); }).detach();
    for (int i = 0; i < helpers; ++i) jobs_.push_back(job);
    work_.notify_all();
  }

 private:
  void Help() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      {
        std::lock_guard<std::mutex> lock(job->mutex);
        if (job->closed) continue;
        ++job->active;
      }
      job->Run();
      std::lock_guard<std::mutex> lock(job->mutex);
      --job->active;
      job->idle.notify_all();
    }
  }

  static std::atomic<Pool*> current_;

  std::mutex mutex_;  // protects jobs_ and num_threads_
  std::condition_variable work_;
  std::deque<std::shared_ptr<Job>> jobs_;  // one entry per helper still wanted
  int num_threads_ = 0;
};

std::atomic<Pool*> Pool::current_{nullptr};

std::atomic<int> requested_threads{0};

}  // namespace

void SetNumThreads(int num_threads) { requested_threads = std::max(0, num_threads); }

int NumThreads() {
  const int requested = requested_threads;
  return requested > 0 ? requested : NumCpus();
}

void ParallelFor(uint64_t count, const std::function<bool(uint64_t)>& work) {
  const auto job = std::make_shared<Job>();
  job->count = count;
  job->work = &work;
  const int helpers = static_cast<int>(std::min<uint64_t>(NumThreads(), count)) - 1;
  if (helpers > 0) Pool::Get().Offer(job, helpers);
  job->Run();
  std::unique_lock<std::mutex> lock(job->mutex);
  job->closed = true;
  job->idle.wait(lock, [&] { return job->active == 0; });
}

}  // namespace jfm
