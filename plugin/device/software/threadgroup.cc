#include "plugin/device/software/threadgroup.h"

#include <cstdio>
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

// Operations beyond those of msl_shim.h's exchanges.
constexpr uint32_t kMultiply = 1000;
constexpr uint32_t kSimdgroupBarrier = 1001;

// Row-major place of a lane's first element in an 8x8 matrix, as in msl_shim.h.
uint32_t MatrixOffset(uint32_t lane) {
  const uint32_t row = (lane >> 2 & 4) | (lane >> 1 & 3);
  const uint32_t col = (lane >> 1 & 4) | (lane & 1) << 1;
  return row * 8 + col;
}

}  // namespace

ThreadgroupRunner::ThreadgroupRunner()
    : stacks_(kMaxThreads),
      arithmetic_(ThisArithmetic()),
      simdgroups_(new Simdgroup[kMaxThreads / kSimdWidth]) {}

std::string ThreadgroupRunner::Run(const KernelLaunch& launch, Size3 position) {
  if (!stacks_.ok()) return "out of memory for the lanes' stacks";
  launch_ = &launch;
  position_ = position;
  const Size3& threads = launch.threads_per_threadgroup;
  num_threads_ = threads.x * threads.y * threads.z;
  num_done_ = num_at_barrier_ = 0;
  error_.clear();
  // Metal promises nothing about the contents; NaN makes a read before a write visible.
  std::memset(arena_, 0xFF, arena_used_ == 0 ? sizeof(arena_) : arena_used_);
  threadgroup_bytes_ = 0;
  arena_used_ = 64;
  for (uint32_t i = 0; i < num_threads_; ++i) {
    state_[i] = kRunning;
    allocated_[i] = 0;
    sp_[i] = stacks_.Prepare(i, &LaneMain);
  }
  for (uint32_t first = 0; first < num_threads_; first += kSimdWidth) {
    Simdgroup& group = simdgroups_[first / kSimdWidth];
    group.waiting = group.turn = 0;
    group.size = num_threads_ - first < kSimdWidth ? num_threads_ - first : kSimdWidth;
  }
#ifdef JFM_CHECKER
  Checker::Get().StartThreadgroup(*this);
#endif
  // A threadgroup never leaves its thread, so kernels may keep what they asked for.
  ThreadgroupRunner* const outer = current_runner;
  current_runner = this;
  current_ = order_ == LaneOrder::kReverse ? num_threads_ - 1 : 0;
  jfm_fiber_switch(&main_sp_, sp_[current_]);
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
  const Size3& n = runner.launch_->threadgroups;
  const Size3& p = runner.position_;
  LaneIds ids;
  ids.threadgroup = {p.x, p.y, p.z};
  ids.threadgroups = {n.x, n.y, n.z};
  ids.thread = {i % t.x, i / t.x % t.y, i / t.x / t.y};
  ids.threads = {t.x, t.y, t.z};
  ids.position = {p.x * t.x + ids.thread.x, p.y * t.y + ids.thread.y, p.z * t.z + ids.thread.z};
  ids.lane = i % kSimdWidth;
  ids.simdgroup = i / kSimdWidth;
  ids.index = i;
  ids.simd_width = kSimdWidth;
  runner.launch_->kernel->entry(runner.launch_->buffers, &ids);
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
        jfm_fiber_switch(&finished, main_sp_);
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
  jfm_fiber_switch(&sp_[self], sp_[next]);
}

void ThreadgroupRunner::Fail(const std::string& reason) {
  error_ = std::string(launch_->kernel->host_name) + ": " + reason + " (threadgroup " +
           std::to_string(position_.x) + ", " + std::to_string(position_.y) + ", " +
           std::to_string(position_.z) + ", thread " + std::to_string(current_) + ").";
  // The lanes' stacks are abandoned: kernels own nothing that needs releasing.
  void* abandoned;
  jfm_fiber_switch(&abandoned, main_sp_);
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
    Release(group);
  } else {
    SwitchAway();
  }
  return slot;
}

void ThreadgroupRunner::Multiply(const float* abc, float* d, const void* place) {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  auto& m = group.matrices[group.turn];
  const uint32_t at = MatrixOffset(current_ % kSimdWidth);
  for (int i = 0; i < 3; ++i) std::memcpy(&m[i][at], abc + 2 * i, 2 * sizeof(float));
  if (Arrive(group, kMultiply, place)) {
    arithmetic_.multiply_accumulate(m[0], m[1], m[2]);
    Release(group);
  } else {
    SwitchAway();
  }
  std::memcpy(d, &m[2][at], 2 * sizeof(float));
}

void ThreadgroupRunner::SimdgroupBarrier(uint32_t flags, const void* place) {
  Simdgroup& group = simdgroups_[current_ / kSimdWidth];
  if (!Arrive(group, kSimdgroupBarrier, place)) return SwitchAway();
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

// Every lane declares the same arrays in the same order and so gets the same addresses.
void* ThreadgroupRunner::ThreadgroupMemory(size_t size, const char* name) {
  const size_t start = (allocated_[current_] + 15) & ~size_t{15};
  const size_t end = start + size;
  if (end > arena_used_) {
    threadgroup_bytes_ += size;
    if (threadgroup_bytes_ > kMaxThreadgroupBytes || end + kRedZone > sizeof(arena_)) {
      Fail("more than " + std::to_string(kMaxThreadgroupBytes) +
           " bytes of threadgroup memory (at '" + name + "')");
    }
#ifdef JFM_CHECKER
    Checker::Get().AddThreadgroupArray(arena_ + start, size, name);
#endif
    arena_used_ = end;
  }
  allocated_[current_] = static_cast<uint32_t>(end + kRedZone);
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

const void* __msl_exchange(const void* value, uint32_t size, uint32_t operation) {
  return current_runner->Exchange(value, size, operation, __builtin_return_address(0));
}
void __msl_multiply_accumulate(const float* abc, float* d) {
  current_runner->Multiply(abc, d, __builtin_return_address(0));
}
uint32_t __msl_lane() { return current_runner->lane(); }
void __msl_threadgroup_barrier(uint32_t flags) {
  current_runner->ThreadgroupBarrier(flags, __builtin_return_address(0));
}
void __msl_simdgroup_barrier(uint32_t flags) {
  current_runner->SimdgroupBarrier(flags, __builtin_return_address(0));
}
void* __msl_threadgroup_alloc(uint64_t size, const char* name) {
  return current_runner->ThreadgroupMemory(size, name);
}
const void* __msl_function_constant(uint32_t index) { return current_runner->constant(index); }

}  // extern "C"
