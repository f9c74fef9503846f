// The checker build's shadow memory: for every piece of threadgroup and device memory, who
// last wrote and read it, and since when. Finds data races, reads of what was never
// written and accesses out of bounds, from the calls that -fsanitize=thread puts before
// each access of a kernel (its own runtime is not linked); counts what each dispatch does;
// tells the barriers that order something from those that do not. Not in the fast build.
// One command buffer at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
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

// The functions that are counted, in the order of kCountedFunctionNames.
enum class CountedFunction : uint8_t { kExp, kExp2, kLog, kLog2, kTanh };
constexpr std::array<const char*, 5> kCountedFunctionNames = {"exp", "exp2", "log", "log2",
                                                              "tanh"};

struct ByteCounts {
  uint64_t read = 0, written = 0;
};

// What one dispatch did. Bytes are summed over lanes, but for those read from device memory:
// what several lanes of a simdgroup read at one address with one access is one request, whose
// result the hardware hands to all of them, and counts once.
struct DispatchCounts {
  std::string kernel;
  Size3 grid;
  uint32_t threads = 0;  // per threadgroup
  uint64_t threadgroups = 0, simdgroups = 0;
  // By simdgroups; products are of 8x8 matrices.
  uint64_t products = 0, shuffles = 0, votes = 0, reductions = 0, simdgroup_barriers = 0;
  std::array<uint64_t, kCountedFunctionNames.size()> calls{};  // by lanes
  uint64_t threadgroup_barriers = 0;                           // by threadgroups
  std::array<ByteCounts, MSL_MAX_BUFFERS> device;              // by buffer index
  uint64_t constant_bytes = 0;                                 // read
  ByteCounts threadgroup;
  uint64_t threadgroup_memory_bytes = 0;  // of a threadgroup, the largest
};

// How often something was met, by a hash of what it is.
class KeyCounts {
 public:
  // The count so far, which it then increases.
  uint32_t Increase(uint64_t key);
  // Forgets, if there is much to forget: for keys that will not come again.
  void ForgetMany();

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t count = 0;  // 0: the slot is free
  };
  Slot& Find(uint64_t key);

  std::vector<Slot> slots_ = std::vector<Slot>(1 << 12);  // a power of two
  size_t num_used_ = 0;
};

// A barrier in the source of a kernel.
struct BarrierPlace {
  bool is_threadgroup = false;  // else of a simdgroup
  uint64_t executions = 0;      // by threadgroups, or simdgroups
  // Whether two accesses were ordered by nothing else: a race if it were not there.
  bool is_needed = false;
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
  void CountProducts(uint64_t count) { counts_->products += count; }
  void CountExchange(uint32_t operation);
  // The lanes of a simdgroup have met: none of them is behind another.
  void Meet(uint32_t simdgroup) { meetings_[simdgroup] = ++num_meetings_; }
  // What the kernels tell. `place` is in the kernel's code.
  void Count(CountedFunction function) { ++counts_->calls[static_cast<size_t>(function)]; }
  // Of the barrier that the lane reaches next.
  void NoteBarrierPlace(const char* file, int line) { barrier_file_ = file, barrier_line_ = line; }
  void Access(const void* address, size_t size_bytes, bool is_write, const void* place);

  // What the tests ask (checker_api.h).
  LaneOrder lane_order() const { return lane_order_; }
  uint32_t seed() const { return seed_; }
  void SetLaneOrder(LaneOrder order, uint32_t seed);
  std::string Reports();
  std::string Counts();
  std::string Barriers();
  void Clear();
  void MarkUninitialized(const void* data, size_t size_bytes);
  bool TakeUninitialized(const void* data, size_t size_bytes);

 private:
  // Counts barriers, and knows the latest: those since `alone_since` were all at its place.
  struct BarrierClock {
    Epoch now = 1;
    Epoch alone_since = 1;
    BarrierPlace* place = nullptr;

    void Restart() { place = nullptr, alone_since = now; }
    void Pass(BarrierPlace* at) {
      if (place != at) alone_since = now;
      place = at;
      ++now;
    }
  };
  // Barriers order accesses of one space or the other, as their flags say.
  struct Clock {
    BarrierClock barriers;  // of the threadgroup
    Epoch dispatch_start = 1;
    Epoch threadgroup_start = 1;
    BarrierClock simdgroups[kMaxThreads / kSimdWidth];

    Epoch now() const { return barriers.now; }
    void StartThreadgroup() {
      threadgroup_start = ++barriers.now;
      barriers.Restart();
      for (BarrierClock& clock : simdgroups) clock.Restart();
    }
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
  struct Bound {
    uint32_t index;
    CheckedBuffer* buffer;
    uintptr_t start;
  };
  using PlaceInSource = std::tuple<std::string, std::string, int>;  // kernel, file, line

  // Whether another lane of the simdgroup has read the address with this access.
  bool IsReadByOthers(uintptr_t address, const void* place);
  void AccessThreadgroup(uintptr_t address, size_t size, bool is_write, const void* place);
  void AccessDevice(const Bound& bound, uintptr_t address, size_t size, bool is_write,
                    const void* place);
  // The name of the fault, or nullptr. Updates the shadow if there is none.
  const char* Check(Shadow& shadow, const Clock& clock, bool is_write) const;
  bool IsRace(const Accessors& earlier, const Clock& clock) const;
  // Of accesses that are no race: notes the barrier without which they were one.
  void NoteNeededBarrier(const Accessors& earlier, const Clock& clock) const;
  BarrierPlace* BarrierHere(bool is_threadgroup);
  const Bound* FindBound(uintptr_t address) const;
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

  DispatchCounts* counts_ = nullptr;  // of the dispatch that runs
  std::deque<DispatchCounts> dispatches_;
  // Number of the latest meeting, by simdgroup. What happens after it in one place in the code
  // for the n-th time in each lane happens in all of them at once.
  uint64_t meetings_[kMaxThreads / kSimdWidth] = {};
  uint64_t num_meetings_ = 0;
  KeyCounts passes_;  // of a lane by a place, since the meeting
  KeyCounts reads_;   // of an address by a simdgroup, with one access
  const char* barrier_file_ = "";
  int barrier_line_ = 0;
  std::map<PlaceInSource, BarrierPlace> barrier_places_;
  std::set<std::pair<std::string, const void*>> reported_;
  std::string reports_;
};

}  // namespace jfm
