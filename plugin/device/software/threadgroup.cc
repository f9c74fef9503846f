#include "plugin/device/software/threadgroup.h"

#include <algorithm>
#include <cstring>

#ifdef JFM_CHECKER
#include "plugin/device/software/checker.h"
#endif

namespace jfm {
namespace {

// initial-exec: one instruction instead of a call, on every use by every lane. The
// library takes 8 bytes of the loader's reserve for that.
thread_local ThreadgroupRunner* current_runner __attribute__((tls_model("initial-exec")));

#ifdef JFM_CHECKER
constexpr size_t kRedZone = 64;
#else
constexpr size_t kRedZone = 0;
#endif

}  // namespace

ThreadgroupRunner::ThreadgroupRunner()
    : stacks_(kMaxThreads),
      run_product_(ThisArithmetic().run_product),
      simdgroups_(new Simdgroup[kMaxThreads / kSimdWidth]) {}

std::string ThreadgroupRunner::Run(const KernelLaunch& launch, Size3 position) {
  if (!stacks_.ok()) return "out of memory for the lanes' stacks";
  launch_ = &launch;
  position_ = position;
  const Size3& threads = launch.threads_per_threadgroup;
  num_threads_ = threads.x * threads.y * threads.z;
  group_.position = {position.x, position.y, position.z};
  group_.grid = {launch.threadgroups.x, launch.threadgroups.y, launch.threadgroups.z};
  group_.threads = {threads.x, threads.y, threads.z};
  std::memcpy(group_.buffers, launch.buffers, sizeof(group_.buffers));
  num_done_ = num_at_barrier_ = 0;
  error_.clear();
  // Metal promises nothing about the contents; NaN makes a read before a write visible.
  std::memset(arena_, 0xFF, arena_used_);
  arena_used_ = kRedZone;
  threadgroup_bytes_ = 0;
  variables_.clear();
  for (uint32_t i = 0; i < num_threads_; ++i) {
    state_[i] = kRunning;
    sp_[i] = stacks_.Prepare(i, &LaneMain);
  }
  for (uint32_t first = 0; first < num_threads_; first += kSimdWidth) {
    Simdgroup& group = simdgroups_[first / kSimdWidth];
    group.waiting = group.turn = 0;
    std::memset(group.num_queued, 0, sizeof(group.num_queued));
    group.num_placed = 0;
    group.size = num_threads_ - first < kSimdWidth ? num_threads_ - first : kSimdWidth;
  }
#ifdef JFM_CHECKER
  Checker::Get().StartThreadgroup(*this);
#endif
  // A threadgroup never leaves its thread, so kernels may keep what they asked for.
  ThreadgroupRunner* const outer = current_runner;
  current_runner = this;
  current_ = order_ == LaneOrder::kReverse ? num_threads_ - 1 : 0;
  SwitchFiber(&main_sp_, sp_[current_]);
  current_runner = outer;
#ifdef JFM_CHECKER
  Checker::Get().EndThreadgroup(*this);
#endif
  return error_;
}

void ThreadgroupRunner::LaneMain() {
  ThreadgroupRunner& runner = *current_runner;
  const uint32_t i = runner.current_;
  const Size3& t = runner.launch_->threads_per_threadgroup;
  MslThread thread;
  thread.group = &runner.group_;
  thread.position = {i % t.x, i / t.x % t.y, i / t.x / t.y};
  thread.index = i;
  thread.simdgroup = i / kSimdWidth;
  thread.lane = i % kSimdWidth;
  runner.launch_->kernel->entry(&thread);
  runner.state_[i] = kDone;
  ++runner.num_done_;
  runner.SwitchAway();
}

// ---------------------------------------------------------------- scheduling

// The next lane that can run; lanes of the same simdgroup first, so that its frames are
// still in the cache when they meet.
bool ThreadgroupRunner::FindRunnable(uint32_t* next) {
  uint32_t start = current_ + 1, step = 1;
  if (order_ == LaneOrder::kReverse) {
    start = current_ + num_threads_ - 1;
    step = num_threads_ - 1;
  } else if (order_ == LaneOrder::kRandom) {
    random_ = random_ * 1664525u + 1013904223u;
    start = random_ >> 8;
  } else {
    const uint32_t first = current_ / kSimdWidth * kSimdWidth;
    const uint32_t size = simdgroups_[current_ / kSimdWidth].size;
    for (uint32_t k = 1; k <= size; ++k) {
      const uint32_t i = first + (current_ - first + k) % size;
      if (state_[i] == kRunning) return *next = i, true;
    }
  }
  uint32_t i = start % num_threads_;
  for (uint32_t k = 0; k < num_threads_; ++k, i = (i + step) % num_threads_) {
    if (state_[i] == kRunning) return *next = i, true;
  }
  return false;
}

void ThreadgroupRunner::SwitchAway() {
  const uint32_t self = current_;
  const uint32_t neighbour = (self & ~(kSimdWidth - 1)) | ((self + 1) & (kSimdWidth - 1));
  uint32_t next = neighbour;
  if (order_ != LaneOrder::kForward || neighbour >= num_threads_ || state_[next] != kRunning) {
    if (!FindRunnable(&next)) {
      if (num_done_ == num_threads_) {
        void* finished;
        SwitchFiber(&finished, main_sp_);
      }
      const std::string counts = std::to_string(num_done_) + " of " +
                                 std::to_string(num_threads_) + " threads have returned, " +
                                 std::to_string(num_at_barrier_) + " wait at a barrier";
      Fail(num_at_barrier_ + num_done_ == num_threads_
               ? "a threadgroup_barrier that not all threads reach: " + counts
               : "a simdgroup function that not all lanes of a simdgroup reach: " + counts +
                     ", the others in a simdgroup function");
    }
  }
  if (next == self) return;
  current_ = next;
  SwitchFiber(&sp_[self], sp_[next]);
}

void ThreadgroupRunner::Fail(const std::string& reason) {
  error_ = std::string(launch_->kernel->host_name) + ": " + reason + " (threadgroup " +
           std::to_string(position_.x) + ", " + std::to_string(position_.y) + ", " +
           std::to_string(position_.z) + ", thread " + std::to_string(current_) + ").";
  // The lanes' stacks are abandoned: kernels own nothing that needs releasing.
  void* abandoned;
  SwitchFiber(&abandoned, main_sp_);
  __builtin_unreachable();
}

bool ThreadgroupRunner::Arrive(Simdgroup& group, uint32_t operation, const void* place) {
  if (group.waiting == 0) {
    group.operation = operation;
    group.place = place;
  } else if (group.operation != operation || group.place != place) {
    Fail("the lanes of a simdgroup meet at different simdgroup functions");
  }
  state_[current_] = kInSimdgroup;
  return ++group.waiting == group.size;
}

void ThreadgroupRunner::Release(Simdgroup& group) {
#ifdef JFM_CHECKER
  Checker::Get().Meet(current_ / kSimdWidth);
#endif
  group.waiting = 0;
  group.turn ^= 1;
  std::memset(&state_[current_ / kSimdWidth * kSimdWidth], kRunning, group.size);
}

// ---------------------------------------------------------------- what kernels call

const void* ThreadgroupRunner::Exchange(const void* value, uint32_t size, uint32_t operation,
                                        const void* place) {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  char* slot = group.exchanged[group.turn];
  std::memcpy(slot + current_ % kSimdWidth * size, value, size);
  if (Arrive(group, operation, place)) {
#ifdef JFM_CHECKER
    Checker::Get().CountExchange(operation);
#endif
    Release(group);
  } else {
    SwitchAway();
  }
  return slot;
}

void ThreadgroupRunner::EnqueueProduct(MslAccumulator* sum, float a0, float a1, float b0,
                                       float b1, const void* place) {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  const uint32_t lane = current_ % kSimdWidth;
  const uint32_t k = group.num_queued[lane]++;
  if (group.num_placed == k) {
    ++group.num_placed;
    group.product_places[k] = place;
  } else if (group.product_places[k] != place) {
    Fail("the lanes of a simdgroup meet at different simdgroup_multiply_accumulate");
  }
  Product& product = group.products[k];
  product.a[lane][0] = a0;
  product.a[lane][1] = a1;
  product.b[lane][0] = b0;
  product.b[lane][1] = b1;
  product.sum[lane] = sum;
  while (group.num_queued[lane] == kMaxQueued) RunProducts();
}

// Lanes that come here have products waiting, but not all the same number: one lane may look
// at a result before the next product where another does not.
void ThreadgroupRunner::RunProducts() {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  if (!Arrive(group, kMslMatrixProduct, nullptr)) return SwitchAway();
  const uint32_t count = *std::min_element(group.num_queued, group.num_queued + group.size);
  for (uint32_t k = 0; k < count; ++k) run_product_(group.products[k]);
#ifdef JFM_CHECKER
  Checker::Get().CountProducts(count);
#endif
  for (uint32_t lane = 0; lane < group.size; ++lane) group.num_queued[lane] -= count;
  std::move(group.products + count, group.products + group.num_placed, group.products);
  std::move(group.product_places + count, group.product_places + group.num_placed,
            group.product_places);
  group.num_placed -= count;
  Release(group);
}

void ThreadgroupRunner::SimdgroupBarrier(uint32_t flags, const void* place) {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  if (!Arrive(group, kMslSimdgroupBarrier, place)) return SwitchAway();
#ifdef JFM_CHECKER
  Checker::Get().SimdgroupBarrier(current_ / kSimdWidth, flags);
#else
  (void)flags;
#endif
  Release(group);
}

void ThreadgroupRunner::ThreadgroupBarrier(uint32_t flags, const void* place) {
  if (num_at_barrier_ == 0) {
    barrier_place_ = place;
  } else if (barrier_place_ != place) {
    Fail("threads of a threadgroup wait at different barriers");
  }
  state_[current_] = kAtBarrier;
  if (++num_at_barrier_ < num_threads_) return SwitchAway();
#ifdef JFM_CHECKER
  Checker::Get().ThreadgroupBarrier(flags);
#else
  (void)flags;
#endif
  num_at_barrier_ = 0;
  std::memset(state_, kRunning, num_threads_);
}

// Every lane asks for every variable, and again each time it comes by the declaration.
void* ThreadgroupRunner::ThreadgroupMemory(uint32_t id, size_t size, size_t alignment,
                                           const char* name) {
  for (const Variable& variable : variables_) {
    if (variable.id == id) return arena_ + variable.start;
  }
  const size_t align = std::max<size_t>(16, alignment);
  const size_t start = (arena_used_ + align - 1) / align * align;
  const size_t end = start + size;
  threadgroup_bytes_ += start - arena_used_ + size;
  if (threadgroup_bytes_ > kMaxThreadgroupBytes || end + kRedZone > kArenaBytes) {
    Fail("more than " + std::to_string(kMaxThreadgroupBytes) +
         " bytes of threadgroup memory (at '" + name + "')");
  }
#ifdef JFM_CHECKER
  Checker::Get().AddThreadgroupArray(arena_ + start, size, name);
#endif
  variables_.push_back({id, start});
  arena_used_ = end + kRedZone;
  return arena_ + start;
}

bool ThreadgroupRunner::IsPrivate(const void* address) const {
  const char* p = static_cast<const char*>(address);
  const char* self = reinterpret_cast<const char*>(this);
  const char* groups = reinterpret_cast<const char*>(simdgroups_.get());
  return stacks_.Contains(address) || (p >= self && p < self + sizeof(*this)) ||
         (p >= groups && p < groups + sizeof(Simdgroup) * (kMaxThreads / kSimdWidth));
}

}  // namespace jfm

// The place of a call in the kernel tells meetings apart: its functions are always inlined.
using jfm::current_runner;

extern "C" {

const void* __msl_exchange(const void* value, unsigned size, unsigned operation) {
  return current_runner->Exchange(value, size, operation, __builtin_return_address(0));
}
void __msl_enqueue_product(MslAccumulator* out, float a0, float a1, float b0, float b1) {
  current_runner->EnqueueProduct(out, a0, a1, b0, b1, __builtin_return_address(0));
}
void __msl_run_products() { current_runner->RunProducts(); }
unsigned __msl_lane_index() { return current_runner->lane(); }
void __msl_threadgroup_barrier(unsigned flags) {
  current_runner->ThreadgroupBarrier(flags, __builtin_return_address(0));
}
void __msl_simdgroup_barrier(unsigned flags) {
  current_runner->SimdgroupBarrier(flags, __builtin_return_address(0));
}
void* __msl_threadgroup_memory(unsigned id, unsigned long size, unsigned long alignment,
                               const char* name) {
  return current_runner->ThreadgroupMemory(id, size, alignment, name);
}
const int* __msl_function_constants() { return current_runner->constants(); }

}  // extern "C"
