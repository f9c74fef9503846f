// The checker build's shadow memory: for every piece of threadgroup and device memory, who
// last wrote and read it, and since when. Finds data races, reads of what was never
// written and accesses out of bounds, from the calls that -fsanitize=thread puts before
// each access of a kernel (its own runtime is not linked). Not in the fast build. One
// command buffer at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plugin/device/device.h"
#include "plugin/device/software/threadgroup.h"

namespace jfm {

// Accesses are ordered by barriers. An epoch is a point between two barriers of a
// threadgroup; it grows through all threadgroups of all dispatches and is never reused.
using Epoch = uint32_t;

// Who accessed a piece of memory. A single lane, or several of one simdgroup or of many.
struct Accessors {
  static constexpr uint16_t kManyLanes = 0xffff;
  Epoch epoch = 0;            // of the latest access; 0 = none yet
  Epoch simdgroup_epoch = 0;  // of the simdgroup, at that time
  uint16_t lane = 0;          // index in the threadgroup, or kManyLanes
  uint16_t simdgroup = 0;     // or kManyLanes
};

struct Shadow {
  Accessors writer, readers;
  Epoch first_read = 0;
  bool is_initialized = false;
};

// A buffer of the checker build: its memory lies between red zones. Wrapped host memory is
// copied in before a command buffer runs, and what kernels wrote is copied back after.
class CheckedBuffer : public Buffer {
 public:
  static constexpr size_t kRedZone = 1 << 20;

  // `host` is nullptr for memory that the device allocates.
  CheckedBuffer(void* host, size_t size_bytes);
  ~CheckedBuffer() override;
  CheckedBuffer(const CheckedBuffer&) = delete;
  CheckedBuffer& operator=(const CheckedBuffer&) = delete;

  size_t size_bytes() const override { return size_bytes_; }
  char* data() const { return data_; }
  std::vector<Shadow>& shadow() { return shadow_; }
  bool Contains(uintptr_t address) const;  // the red zones included
  void CopyIn();
  void CopyBack();

 private:
  char* const host_;
  const size_t size_bytes_;
  size_t mapped_bytes_ = 0;
  char* mapped_ = nullptr;
  char* data_ = nullptr;
  bool is_copied_in_ = false;
  std::vector<Shadow> shadow_;
};

class Checker {
 public:
  static Checker& Get();

  // Held by a command buffer while it runs.
  std::mutex& mutex() { return mutex_; }

  // What the device tells.
  void StartDispatch(const std::vector<BufferBinding>& bindings, const KernelLaunch& launch);
  void AddConstants(const void* data, size_t size_bytes);
  void FinishCommandBuffer(const std::vector<BufferBinding>& bindings);
  // What the threadgroup runner tells.
  void StartThreadgroup(ThreadgroupRunner& runner);
  void EndThreadgroup(const ThreadgroupRunner& runner);
  void AddThreadgroupArray(const char* start, size_t size_bytes, const char* name);
  void ThreadgroupBarrier(uint32_t flags);
  void SimdgroupBarrier(uint32_t simdgroup, uint32_t flags);
  void CountSwitch() { ++statistics_->switches; }
  void CountProducts(uint64_t count) { statistics_->products += count; }
  // What the kernels tell. `place` is in the kernel's code.
  void Access(const void* address, size_t size_bytes, bool is_write, const void* place);

  // What the tests ask (checker_api.h).
  LaneOrder lane_order() const { return lane_order_; }
  uint32_t seed() const { return seed_; }
  void SetLaneOrder(LaneOrder order, uint32_t seed);
  std::string Reports();
  std::string Statistics();
  void Clear();
  void MarkUninitialized(const void* data, size_t size_bytes);
  bool TakeUninitialized(const void* data, size_t size_bytes);

 private:
  // Barriers order accesses of one space or the other, as their flags say.
  struct Clock {
    Epoch now = 1;
    Epoch dispatch_start = 1;
    Epoch threadgroup_start = 1;
    Epoch simdgroups[kMaxThreads / kSimdWidth] = {};
  };
  struct ThreadgroupArray {
    uintptr_t start;
    size_t size_bytes;
    std::string name;
  };
  struct Range {
    uintptr_t start;
    size_t size_bytes;
  };
  struct KernelStatistics {
    uint64_t dispatches = 0, threadgroups = 0, threadgroup_bytes = 0;
    uint64_t switches = 0, products = 0, accesses = 0;
  };
  struct Bound {
    uint32_t index;
    CheckedBuffer* buffer;
  };

  void AccessThreadgroup(uintptr_t address, size_t size, bool is_write, const void* place);
  void AccessDevice(const Bound& bound, uintptr_t address, size_t size, bool is_write,
                    const void* place);
  // The name of the fault, or nullptr. Updates the shadow if there is none.
  const char* Check(Shadow& shadow, const Clock& clock, bool is_write) const;
  bool IsRace(const Accessors& earlier, const Clock& clock) const;
  void Record(Accessors& accessors, const Clock& clock) const;
  void Report(const std::string& kind, const std::string& where, const void* place,
              const Shadow* shadow);
  static bool IsOwnImage(uintptr_t address);

  std::mutex mutex_;
  std::mutex settings_mutex_;  // protects uninitialized_
  LaneOrder lane_order_ = LaneOrder::kForward;
  uint32_t seed_ = 1;
  std::vector<Range> uninitialized_;

  ThreadgroupRunner* runner_ = nullptr;  // nullptr between threadgroups
  std::string kernel_;
  std::vector<Bound> bound_;
  std::vector<Range> constants_;
  std::vector<ThreadgroupArray> arrays_;
  std::vector<Shadow> threadgroup_shadow_;
  Clock threadgroup_clock_, device_clock_;

  KernelStatistics* statistics_ = nullptr;
  std::map<std::string, KernelStatistics> kernel_statistics_;
  std::set<std::pair<std::string, const void*>> reported_;
  std::string reports_;
};

}  // namespace jfm
