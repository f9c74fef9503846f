// Runs one threadgroup of a kernel on the calling thread: lanes are fibers, simdgroup
// functions and barriers are meeting points. A breach of Metal's rules (lanes that meet at
// different places, a barrier that not everyone reaches) is an error with its reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugin/device/device.h"
#include "plugin/device/software/arithmetic.h"
#include "plugin/device/software/fiber.h"
#include "plugin/device/software/kernel_abi.h"

namespace jfm {

constexpr uint32_t kSimdWidth = MSL_SIMD_WIDTH;
constexpr uint32_t kMaxThreads = 1024;
constexpr size_t kMaxThreadgroupBytes = 32 * 1024;

// One dispatch, as its threadgroups see it.
struct KernelLaunch {
  const SoftwareKernel* kernel;
  int32_t constants[kMaxFunctionConstants];
  uint64_t buffers[MSL_MAX_BUFFERS];
  Size3 threadgroups, threads_per_threadgroup;
};

// In which order the lanes of a threadgroup run between two meeting points. Metal promises
// none; the checker tries several.
enum class LaneOrder { kForward, kReverse, kRandom };

class ThreadgroupRunner {
 public:
  ThreadgroupRunner();
  // Runs the threadgroup at `position`; the text of the error, empty if there was none.
  std::string Run(const KernelLaunch& launch, Size3 position);
  size_t threadgroup_bytes() const { return threadgroup_bytes_; }

  void set_lane_order(LaneOrder order, uint32_t seed) {
    order_ = order;
    random_ = seed * 2654435761u + 1;
  }

  // What the kernels call (threadgroup.cc).
  const void* Exchange(const void* value, uint32_t size, uint32_t operation, const void* place);
  void EnqueueProduct(MslAccumulator* sum, float a0, float a1, float b0, float b1,
                      const void* place);
  void RunProducts();
  void SimdgroupBarrier(uint32_t flags, const void* place);
  void ThreadgroupBarrier(uint32_t flags, const void* place);
  void* ThreadgroupMemory(uint32_t id, size_t size, size_t alignment, const char* name);
  uint32_t lane() const { return current_ % kSimdWidth; }
  const int32_t* constants() const { return launch_->constants; }

  // Ends the threadgroup with an error. Called on a lane's stack.
  [[noreturn]] void Fail(const std::string& reason);

  // For the checker.
  static constexpr size_t kArenaBytes = 2 * kMaxThreadgroupBytes;  // room for red zones
  const KernelLaunch& launch() const { return *launch_; }
  Size3 position() const { return position_; }
  uint32_t current_thread() const { return current_; }
  bool IsPrivate(const void* address) const;
  const char* threadgroup_memory() const { return arena_; }

 private:
  static constexpr uint32_t kMaxQueued = 32;
  enum State : uint8_t { kRunning, kInSimdgroup, kAtBarrier, kDone };

  // Where the lanes of a simdgroup meet. Exchanges have two buffers in turn: a lane that has
  // gone on to the next must not overwrite what a slower one has still to read. Products
  // wait in a queue, so that one meeting pays for many of them.
  struct Simdgroup {
    alignas(64) Product products[kMaxQueued];
    const void* product_places[kMaxQueued];
    uint32_t num_queued[kSimdWidth];  // per lane
    uint32_t num_placed;              // products whose place is known
    alignas(64) char exchanged[2][kSimdWidth * 16];
    const void* place;
    uint32_t operation, waiting, size, turn;
  };

  static void LaneMain();
  // Registers this lane at a meeting; true for the last one, which must call Release.
  bool Arrive(Simdgroup& group, uint32_t operation, const void* place);
  void Release(Simdgroup& group);
  void RunQueue(Simdgroup& group);
  void SwitchAway();
  bool FindRunnable(uint32_t* next);

  FiberStacks stacks_;
  const RunProduct run_product_;
  const KernelLaunch* launch_ = nullptr;
  Size3 position_;
  MslGroup group_;
  std::string error_;
  void* main_sp_ = nullptr;
  uint32_t num_threads_ = 0, current_ = 0, num_done_ = 0, num_at_barrier_ = 0;
  const void* barrier_place_ = nullptr;
  LaneOrder order_ = LaneOrder::kForward;
  uint32_t random_ = 1;
  State state_[kMaxThreads];
  void* sp_[kMaxThreads];
  // The kernel's threadgroup variables so far, by the id that the front end gave them.
  struct Variable {
    uint32_t id;
    size_t start;  // in arena_
  };
  std::vector<Variable> variables_;
  size_t threadgroup_bytes_ = 0;  // without the checker's red zones
  size_t arena_used_ = kArenaBytes;
  std::unique_ptr<Simdgroup[]> simdgroups_;
  alignas(64) char arena_[kArenaBytes];
};

}  // namespace jfm
