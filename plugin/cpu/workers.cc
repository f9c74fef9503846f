#include "plugin/cpu/workers.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

#include "plugin/host_cpu.h"

namespace jfm::cpu {
namespace {

std::atomic<int> requested_threads{0};

// One call of Workers::Run. Lives as long as the last of its helpers, which may start when
// that call has long returned: `body` and `context`, which are the caller's, are touched only
// for a claimed block, and the caller waits for those.
class Work {
 public:
  using Body = void (*)(void*, int64_t, int);

  Work(int64_t num_blocks, Body body, void* context)
      : num_blocks_(num_blocks), body_(body), context_(context) {}

  // A reference for a helper that is about to be scheduled.
  void AddReference() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // A helper's whole life.
  static void Help(void* data) {
    Work& work = *static_cast<Work*>(data);
    const int64_t block = work.Claim();
    if (block < work.num_blocks_) {
      // Only who works takes a number: there are no more of them than references.
      work.RunFrom(block, work.num_helpers_.fetch_add(1, std::memory_order_relaxed) + 1);
    }
    work.Release();
  }

  // The caller's part: returns when every block is done.
  void RunAndWait() {
    RunFrom(Claim(), 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return num_done_ == num_blocks_; });
  }

 private:
  ~Work() = default;

  int64_t Claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void RunFrom(int64_t block, int worker) {
    int64_t count = 0;
    for (; block < num_blocks_; block = Claim(), ++count) body_(context_, block, worker);
    std::lock_guard<std::mutex> lock(mutex_);
    num_done_ += count;
    if (num_done_ == num_blocks_) done_.notify_all();
  }

  const int64_t num_blocks_;
  const Body body_;
  void* const context_;
  std::atomic<int64_t> next_{0};
  std::atomic<int> num_helpers_{0};
  std::atomic<int> references_{1};
  std::mutex mutex_;  // protects num_done_
  std::condition_variable done_;
  int64_t num_done_ = 0;
};

}  // namespace

int NumThreads() {
  const int requested = requested_threads.load(std::memory_order_relaxed);
  return requested > 0 ? requested : NumCpus();
}

bool HasSetNumThreads() { return requested_threads.load(std::memory_order_relaxed) > 0; }

void SetNumThreads(int num_threads) {
  requested_threads.store(std::max(0, num_threads), std::memory_order_relaxed);
}

void Workers::Run(int64_t num_blocks, void (*body)(void* context, int64_t block, int worker),
                  void* context) noexcept {
  const int num_helpers = helpers_ != nullptr ? max_workers(num_blocks) - 1 : 0;
  Work* work = num_helpers > 0 ? new (std::nothrow) Work(num_blocks, body, context) : nullptr;
  if (work == nullptr) {
    for (int64_t block = 0; block < num_blocks; ++block) body(context, block, 0);
    return;
  }
  for (int i = 0; i < num_helpers; ++i) {
    work->AddReference();
    if (helpers_->Schedule(&Work::Help, work)) continue;
    work->Release();
    break;  // the next would be refused as well
  }
  work->RunAndWait();
  work->Release();
}

}  // namespace jfm::cpu
