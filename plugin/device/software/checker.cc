#ifdef JFM_CHECKER

#include "plugin/device/software/checker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "plugin/device/software/checker_api.h"

// Where the linker put this library, which is also where the kernels' constants are.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" const char _end[] __attribute__((visibility("hidden")));

namespace jfm {
namespace {

constexpr uint32_t kMemDevice = 1;       // metal::mem_flags
constexpr uint32_t kMemThreadgroup = 2;  // metal::mem_flags

std::string Position(Size3 p) {
  return "(" + std::to_string(p.x) + ", " + std::to_string(p.y) + ", " + std::to_string(p.z) + ")";
}

std::string Lanes(const Accessors& accessors) {
  if (accessors.lane != Accessors::kManyLanes) {
    return "thread " + std::to_string(accessors.lane);
  }
  if (accessors.simdgroup != Accessors::kManyLanes) {
    return "several threads of simdgroup " + std::to_string(accessors.simdgroup);
  }
  return "threads of several simdgroups";
}

size_t CopyText(const std::string& from, char* to, size_t size) {
  if (size > 0) {
    const size_t length = std::min(from.size(), size - 1);
    std::memcpy(to, from.data(), length);
    to[length] = '\0';
  }
  return from.size();
}

std::string Field(const char* name, uint64_t value) {
  return "\"" + std::string(name) + "\": " + std::to_string(value) + ", ";
}

std::string Field(const char* name, const ByteCounts& bytes) {
  return Field((std::string(name) + "_bytes_read").c_str(), bytes.read) +
         Field((std::string(name) + "_bytes_written").c_str(), bytes.written);
}

// Names of kernels and files need no escapes.
std::string Json(const DispatchCounts& c) {
  std::string calls, buffers;
  for (size_t i = 0; i < c.calls.size(); ++i) calls += Field(kCountedFunctionNames[i], c.calls[i]);
  ByteCounts device;
  for (size_t i = 0; i < c.device.size(); ++i) {
    const ByteCounts& bytes = c.device[i];
    if (bytes.read + bytes.written == 0) continue;
    device.read += bytes.read;
    device.written += bytes.written;
    buffers += "\"" + std::to_string(i) + "\": [" + std::to_string(bytes.read) + ", " +
               std::to_string(bytes.written) + "], ";
  }
  for (std::string* list : {&calls, &buffers}) {
    if (!list->empty()) list->resize(list->size() - 2);  // the last comma
  }
  return "{\"kernel\": \"" + c.kernel + "\", \"grid\": [" + std::to_string(c.grid.x) + ", " +
         std::to_string(c.grid.y) + ", " + std::to_string(c.grid.z) + "], " +
         Field("threads", c.threads) + Field("threadgroups", c.threadgroups) +
         Field("simdgroups", c.simdgroups) + Field("products", c.products) +
         Field("shuffles", c.shuffles) + Field("votes", c.votes) +
         Field("reductions", c.reductions) +
         Field("threadgroup_barriers", c.threadgroup_barriers) +
         Field("simdgroup_barriers", c.simdgroup_barriers) + Field("device", device) +
         Field("constant_bytes_read", c.constant_bytes) + Field("threadgroup", c.threadgroup) +
         Field("threadgroup_memory_bytes", c.threadgroup_memory_bytes) + "\"calls\": {" + calls +
         "}, \"buffers\": {" + buffers + "}}";
}

}  // namespace

// ---------------------------------------------------------------- counts

KeyCounts::Slot& KeyCounts::Find(uint64_t key) {
  size_t i = key & (slots_.size() - 1);
  while (slots_[i].count != 0 && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
  return slots_[i];
}

uint32_t KeyCounts::Increase(uint64_t key) {
  if (2 * num_used_ >= slots_.size()) {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.count != 0) Find(slot.key) = slot;
    }
  }
  Slot& slot = Find(key);
  if (slot.count == 0) {
    slot.key = key;
    ++num_used_;
  }
  return slot.count++;
}

void KeyCounts::ForgetMany() {
  if (num_used_ < 1 << 14) return;
  std::fill(slots_.begin(), slots_.end(), Slot());
  num_used_ = 0;
}

// ---------------------------------------------------------------- buffers

CheckedBuffer::CheckedBuffer(void* host, size_t size_bytes)
    : host_(static_cast<char*>(host)), size_bytes_(size_bytes) {
  // The data ends at a page, so that its end and the red zone's start are one address.
  constexpr size_t kPage = 4096;
  const size_t rounded = (size_bytes + kPage - 1) / kPage * kPage;
  mapped_bytes_ = rounded + 2 * kRedZone;
  void* mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return;
  mapped_ = static_cast<char*>(mapped);
  data_ = mapped_ + kRedZone + (rounded - size_bytes) / 64 * 64;
  // NaN, so that a wrong read shows in the result as well.
  std::memset(data_ - kPage, 0xFF, size_bytes + 2 * kPage);
  shadow_.resize(size_bytes);
}

CheckedBuffer::~CheckedBuffer() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

bool CheckedBuffer::Contains(uintptr_t address) const {
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapped_);
  return address >= start && address < start + mapped_bytes_;
}

void CheckedBuffer::CopyIn() {
  if (host_ == nullptr || is_copied_in_ || size_bytes_ == 0) return;
  std::memcpy(data_, host_, size_bytes_);
  const bool is_initialized = !Checker::Get().TakeUninitialized(host_, size_bytes_);
  Shadow fresh;
  fresh.is_initialized = is_initialized;
  std::fill(shadow_.begin(), shadow_.end(), fresh);
  is_copied_in_ = true;
}

void CheckedBuffer::CopyBack() {
  if (!is_copied_in_) return;
  is_copied_in_ = false;
  for (size_t i = 0; i < shadow_.size(); ++i) {
    if (shadow_[i].writer.epoch != 0) host_[i] = data_[i];
  }
}

// ---------------------------------------------------------------- dispatches, threadgroups

Checker& Checker::Get() {
  static Checker& checker = *new Checker;
  return checker;
}

void Checker::StartDispatch(const std::vector<BufferBinding>& bindings,
                            const KernelLaunch& launch) {
  kernel_ = launch.kernel->host_name;
  bound_.clear();
  for (const BufferBinding& b : bindings) {
    auto* buffer = const_cast<CheckedBuffer*>(static_cast<const CheckedBuffer*>(b.buffer));
    buffer->CopyIn();
    const uintptr_t data = reinterpret_cast<uintptr_t>(buffer->data());
    bound_.push_back({b.index, buffer, data + b.offset_bytes});
  }
  device_clock_.dispatch_start = ++device_clock_.barriers.now;
  counts_ = &dispatches_.emplace_back();
  counts_->kernel = kernel_;
  counts_->grid = launch.threadgroups;
  const Size3& threads = launch.threads_per_threadgroup;
  counts_->threads = threads.x * threads.y * threads.z;
}

void Checker::AddConstants(const void* data, size_t size_bytes) {
  constants_.push_back({reinterpret_cast<uintptr_t>(data), size_bytes});
}

void Checker::FinishCommandBuffer(const std::vector<BufferBinding>& bindings) {
  for (const BufferBinding& b : bindings) {
    const_cast<CheckedBuffer*>(static_cast<const CheckedBuffer*>(b.buffer))->CopyBack();
  }
  bound_.clear();
  constants_.clear();
}

void Checker::StartThreadgroup(ThreadgroupRunner& runner) {
  runner_ = &runner;
  for (uint64_t& meeting : meetings_) meeting = ++num_meetings_;
  passes_.ForgetMany();
  reads_.ForgetMany();
  arrays_.clear();
  threadgroup_shadow_.resize(ThreadgroupRunner::kArenaBytes);
  threadgroup_clock_.StartThreadgroup();
  // Threadgroup memory is new: nothing before counts.
  threadgroup_clock_.dispatch_start = threadgroup_clock_.threadgroup_start;
  device_clock_.StartThreadgroup();
  ++counts_->threadgroups;
  counts_->simdgroups += (counts_->threads + kSimdWidth - 1) / kSimdWidth;
}

void Checker::EndThreadgroup(const ThreadgroupRunner& runner) {
  uint64_t& bytes = counts_->threadgroup_memory_bytes;
  bytes = std::max<uint64_t>(bytes, runner.threadgroup_bytes());
  runner_ = nullptr;
}

void Checker::AddThreadgroupArray(const char* start, size_t size_bytes, const char* name) {
  arrays_.push_back({reinterpret_cast<uintptr_t>(start), size_bytes, name});
}

void Checker::ThreadgroupBarrier(uint32_t flags) {
  ++counts_->threadgroup_barriers;
  for (uint64_t& meeting : meetings_) meeting = ++num_meetings_;
  BarrierPlace* place = BarrierHere(true);
  if (flags & kMemThreadgroup) threadgroup_clock_.barriers.Pass(place);
  if (flags & kMemDevice) device_clock_.barriers.Pass(place);
}

void Checker::SimdgroupBarrier(uint32_t simdgroup, uint32_t flags) {
  ++counts_->simdgroup_barriers;
  BarrierPlace* place = BarrierHere(false);
  if (flags & kMemThreadgroup) threadgroup_clock_.simdgroups[simdgroup].Pass(place);
  if (flags & kMemDevice) device_clock_.simdgroups[simdgroup].Pass(place);
}

BarrierPlace* Checker::BarrierHere(bool is_threadgroup) {
  BarrierPlace& place = barrier_places_[{kernel_, barrier_file_, barrier_line_}];
  place.is_threadgroup = is_threadgroup;
  ++place.executions;
  return &place;
}

void Checker::CountExchange(uint32_t operation) {
  switch (operation) {
    case kMslShuffle:
    case kMslShuffleXor:
    case kMslShuffleDown:
    case kMslShuffleUp:
    case kMslShuffleRotate:
    case kMslBroadcast:
      ++counts_->shuffles;
      break;
    case kMslBallot:
    case kMslAny:
    case kMslAll:
      ++counts_->votes;
      break;
    default:
      ++counts_->reductions;
  }
}

// ---------------------------------------------------------------- accesses

void Checker::Access(const void* pointer, size_t size, bool is_write, const void* place) {
  if (runner_ == nullptr || size == 0) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t arena = reinterpret_cast<uintptr_t>(runner_->threadgroup_memory());
  if (address >= arena && address < arena + ThreadgroupRunner::kArenaBytes) {
    (is_write ? counts_->threadgroup.written : counts_->threadgroup.read) += size;
    return AccessThreadgroup(address, size, is_write, place);
  }
  // Buffer addresses and function constants.
  const uintptr_t launch = reinterpret_cast<uintptr_t>(&runner_->launch());
  const bool is_argument = address >= launch && address < launch + sizeof(KernelLaunch);
  if (is_argument || runner_->IsPrivate(pointer)) return;
  if (const Bound* bound = FindBound(address)) {
    ByteCounts& bytes = counts_->device[bound->index];
    if (is_write) {
      bytes.written += size;
    } else if (!IsReadByOthers(address, place)) {
      bytes.read += size;
    }
    return AccessDevice(*bound, address, size, is_write, place);
  }
  for (const Range& range : constants_) {
    if (address < range.start || address >= range.start + range.size_bytes) continue;
    if (is_write) return Report("write to constant memory", "constant", place, nullptr);
    counts_->constant_bytes += size;
    if (address + size > range.start + range.size_bytes) {
      Report("read out of bounds", "constant", place, nullptr);
    }
    return;
  }
  if (!is_write && IsOwnImage(address)) {
    counts_->constant_bytes += size;
    return;
  }
  Report(is_write ? "wild write" : "wild read", "no buffer that is bound", place, nullptr);
  // Going on would most likely end the process.
  runner_->Fail(is_write ? "a write outside every buffer" : "a read outside every buffer");
}

bool Checker::IsReadByOthers(uintptr_t address, const void* place) {
  const auto mix = [](uint64_t hash, uint64_t x) {
    hash = (hash ^ x) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
  };
  const uint32_t thread = runner_->current_thread();
  const uint64_t meeting = meetings_[thread / kSimdWidth];
  const uint64_t here = mix(mix(1, reinterpret_cast<uintptr_t>(place)), meeting);
  const uint32_t pass = passes_.Increase(mix(here, thread));
  return reads_.Increase(mix(mix(here, pass), address)) != 0;
}

// Of bindings that share a buffer: the one that begins last before the address.
const Checker::Bound* Checker::FindBound(uintptr_t address) const {
  const Bound* found = nullptr;
  for (const Bound& bound : bound_) {
    if (!bound.buffer->Contains(address)) continue;
    const bool is_closer =
        found != nullptr && bound.start <= address && bound.start > found->start;
    if (found == nullptr || is_closer) found = &bound;
  }
  return found;
}

void Checker::AccessThreadgroup(uintptr_t address, size_t size, bool is_write, const void* place) {
  const auto array =
      std::find_if(arrays_.begin(), arrays_.end(), [address](const ThreadgroupArray& a) {
        return address >= a.start && address < a.start + a.size_bytes;
      });
  if (array == arrays_.end() || address + size > array->start + array->size_bytes) {
    const std::string where = array == arrays_.end() ? "threadgroup memory" : array->name;
    return Report(is_write ? "write out of bounds" : "read out of bounds", where, place, nullptr);
  }
  const size_t first = address - reinterpret_cast<uintptr_t>(runner_->threadgroup_memory());
  for (size_t i = first; i < first + size; ++i) {
    Shadow& shadow = threadgroup_shadow_[i];
    // Only this threadgroup's writes count.
    shadow.is_initialized = shadow.writer.epoch >= threadgroup_clock_.threadgroup_start;
    const Shadow before = shadow;
    if (const char* fault = Check(shadow, threadgroup_clock_, is_write)) {
      const std::string offset = std::to_string(address - array->start);
      return Report(fault, array->name + " + " + offset, place, &before);
    }
  }
}

void Checker::AccessDevice(const Bound& bound, uintptr_t address, size_t size, bool is_write,
                           const void* place) {
  const uintptr_t data = reinterpret_cast<uintptr_t>(bound.buffer->data());
  const int64_t offset = static_cast<int64_t>(address - data);
  const std::string where =
      "buffer(" + std::to_string(bound.index) + ") + " + std::to_string(offset);
  if (offset < 0 || offset + size > bound.buffer->size_bytes()) {
    return Report(is_write ? "write out of bounds" : "read out of bounds", where, place, nullptr);
  }
  for (size_t i = 0; i < size; ++i) {
    Shadow& shadow = bound.buffer->shadow()[offset + i];
    const Shadow before = shadow;
    if (const char* fault = Check(shadow, device_clock_, is_write)) {
      return Report(fault, where, place, &before);
    }
  }
}

const char* Checker::Check(Shadow& shadow, const Clock& clock, bool is_write) const {
  if (IsRace(shadow.writer, clock)) return is_write ? "race: two writes" : "race: read after write";
  NoteNeededBarrier(shadow.writer, clock);
  if (!is_write) {
    if (!shadow.is_initialized) return "uninitialized read";
    if (shadow.first_read < clock.dispatch_start) shadow.first_read = clock.now();
    Record(shadow.readers, clock);
    return nullptr;
  }
  // Another threadgroup of this dispatch may have read it before the latest reader did.
  const bool is_read_elsewhere =
      shadow.first_read >= clock.dispatch_start && shadow.first_read < clock.threadgroup_start;
  if (is_read_elsewhere || IsRace(shadow.readers, clock)) return "race: write after read";
  NoteNeededBarrier(shadow.readers, clock);
  shadow.writer = Accessors();
  Record(shadow.writer, clock);
  shadow.is_initialized = true;
  return nullptr;
}

bool Checker::IsRace(const Accessors& earlier, const Clock& clock) const {
  if (earlier.epoch < clock.dispatch_start) return false;
  if (earlier.epoch < clock.threadgroup_start) return true;  // of another threadgroup
  if (earlier.epoch < clock.now()) return false;             // a barrier lies between
  const uint32_t thread = runner_->current_thread();
  if (earlier.lane == thread) return false;
  const bool is_same_simdgroup = earlier.simdgroup == thread / kSimdWidth;
  return !is_same_simdgroup ||
         earlier.simdgroup_epoch == clock.simdgroups[thread / kSimdWidth].now;
}

void Checker::NoteNeededBarrier(const Accessors& earlier, const Clock& clock) const {
  if (earlier.epoch < clock.threadgroup_start) return;  // ordered by the end of a dispatch
  const uint32_t thread = runner_->current_thread();
  if (earlier.lane == thread) return;
  const BarrierClock& own = clock.simdgroups[thread / kSimdWidth];
  const bool is_ordered_in_simdgroup =
      earlier.simdgroup == thread / kSimdWidth && earlier.simdgroup_epoch < own.now;
  const bool is_ordered_in_threadgroup = earlier.epoch < clock.now();
  // Where both kinds lie between, each would do without the other.
  if (is_ordered_in_threadgroup == is_ordered_in_simdgroup) return;
  const BarrierClock& barriers = is_ordered_in_threadgroup ? clock.barriers : own;
  const Epoch since = is_ordered_in_threadgroup ? earlier.epoch : earlier.simdgroup_epoch;
  if (since >= barriers.alone_since) barriers.place->is_needed = true;
}

void Checker::Record(Accessors& accessors, const Clock& clock) const {
  const auto thread = static_cast<uint16_t>(runner_->current_thread());
  const auto simdgroup = static_cast<uint16_t>(thread / kSimdWidth);
  const Epoch simdgroup_epoch = clock.simdgroups[simdgroup].now;
  if (accessors.epoch != clock.now()) {
    accessors = {clock.now(), simdgroup_epoch, thread, simdgroup};
    return;
  }
  if (accessors.lane != thread) accessors.lane = Accessors::kManyLanes;
  if (accessors.simdgroup != simdgroup) accessors.simdgroup = Accessors::kManyLanes;
  accessors.simdgroup_epoch = simdgroup_epoch;
}

bool Checker::IsOwnImage(uintptr_t address) {
  return address >= reinterpret_cast<uintptr_t>(__ehdr_start) &&
         address < reinterpret_cast<uintptr_t>(_end);
}

// ---------------------------------------------------------------- reports

void Checker::Report(const std::string& kind, const std::string& where, const void* place,
                     const Shadow* shadow) {
  if (!reported_.insert({kind, place}).second) return;
  char offset[32];
  // -1: the call, not the instruction after it.
  std::snprintf(offset, sizeof(offset), "0x%zx",
                reinterpret_cast<uintptr_t>(place) - 1 - reinterpret_cast<uintptr_t>(__ehdr_start));
  std::string details = "threadgroup " + Position(runner_->position()) + ", thread " +
                        std::to_string(runner_->current_thread());
  if (shadow != nullptr && shadow->writer.epoch != 0) {
    details += ", last written by " + Lanes(shadow->writer);
  }
  if (shadow != nullptr && shadow->readers.epoch != 0) {
    details += ", last read by " + Lanes(shadow->readers);
  }
  reports_ += kind + "\t" + kernel_ + "\t" + where + "\t" + offset + "\t" + details + "\n";
}

void Checker::SetLaneOrder(LaneOrder order, uint32_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  lane_order_ = order;
  seed_ = seed;
}

std::string Checker::Reports() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reports_;
}

std::string Checker::Counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const DispatchCounts& counts : dispatches_) text += Json(counts) + "\n";
  return text;
}

std::string Checker::Barriers() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [where, place] : barrier_places_) {
    const auto& [kernel, file, line] = where;
    text += "{\"kernel\": \"" + kernel + "\", \"file\": \"" + file + "\", " +
            Field("line", static_cast<uint64_t>(line)) + "\"scope\": \"" +
            (place.is_threadgroup ? "threadgroup" : "simdgroup") + "\", " +
            Field("executions", place.executions) + "\"is_needed\": " +
            (place.is_needed ? "true" : "false") + "}\n";
  }
  return text;
}

void Checker::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  reports_.clear();
  reported_.clear();
  dispatches_.clear();
  barrier_places_.clear();
}

void Checker::MarkUninitialized(const void* data, size_t size_bytes) {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  uninitialized_.push_back({reinterpret_cast<uintptr_t>(data), size_bytes});
}

bool Checker::TakeUninitialized(const void* data, size_t size_bytes) {
  std::lock_guard<std::mutex> lock(settings_mutex_);
  const auto found = std::find_if(
      uninitialized_.begin(), uninitialized_.end(), [=](const Range& range) {
        return range.start == reinterpret_cast<uintptr_t>(data) && range.size_bytes == size_bytes;
      });
  if (found == uninitialized_.end()) return false;
  uninitialized_.erase(found);
  return true;
}

}  // namespace jfm

using jfm::Checker;

extern "C" {

void jfm_software_set_lane_order(int order, uint32_t seed) {
  Checker::Get().SetLaneOrder(static_cast<jfm::LaneOrder>(order), seed);
}
size_t jfm_software_reports(char* text, size_t size) {
  return jfm::CopyText(Checker::Get().Reports(), text, size);
}
size_t jfm_software_counts(char* text, size_t size) {
  return jfm::CopyText(Checker::Get().Counts(), text, size);
}
size_t jfm_software_barriers(char* text, size_t size) {
  return jfm::CopyText(Checker::Get().Barriers(), text, size);
}
void jfm_software_clear() { Checker::Get().Clear(); }
void jfm_software_mark_uninitialized(const void* data, size_t size_bytes) {
  Checker::Get().MarkUninitialized(data, size_bytes);
}

// The calls that msl_shim.h puts into kernels.
void __msl_note_barrier_place(const char* file, int line) {
  Checker::Get().NoteBarrierPlace(file, line);
}
#define JFM_COUNTED(name, function)                            \
  float __msl_##name(float x) {                                \
    Checker::Get().Count(jfm::CountedFunction::function);      \
    return __builtin_##name##f(x);                             \
  }
JFM_COUNTED(exp, kExp)
JFM_COUNTED(exp2, kExp2)
JFM_COUNTED(log, kLog)
JFM_COUNTED(log2, kLog2)
JFM_COUNTED(tanh, kTanh)
#undef JFM_COUNTED

// The calls that -fsanitize=thread puts into kernels.
#define JFM_ACCESS(size)                                                      \
  void __tsan_read##size(void* p) {                                           \
    Checker::Get().Access(p, size, false, __builtin_return_address(0));       \
  }                                                                           \
  void __tsan_write##size(void* p) {                                          \
    Checker::Get().Access(p, size, true, __builtin_return_address(0));        \
  }                                                                           \
  void __tsan_unaligned_read##size(void* p) {                                 \
    Checker::Get().Access(p, size, false, __builtin_return_address(0));       \
  }                                                                           \
  void __tsan_unaligned_write##size(void* p) {                                \
    Checker::Get().Access(p, size, true, __builtin_return_address(0));        \
  }                                                                           \
  void __tsan_read_write##size(void* p) {                                     \
    Checker::Get().Access(p, size, false, __builtin_return_address(0));       \
    Checker::Get().Access(p, size, true, __builtin_return_address(0));        \
  }                                                                           \
  void __tsan_unaligned_read_write##size(void* p) {                           \
    Checker::Get().Access(p, size, false, __builtin_return_address(0));       \
    Checker::Get().Access(p, size, true, __builtin_return_address(0));        \
  }
JFM_ACCESS(1)
JFM_ACCESS(2)
JFM_ACCESS(4)
JFM_ACCESS(8)
JFM_ACCESS(16)
#undef JFM_ACCESS

void* __tsan_memcpy(void* to, const void* from, size_t size) {
  Checker::Get().Access(from, size, false, __builtin_return_address(0));
  Checker::Get().Access(to, size, true, __builtin_return_address(0));
  return std::memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  Checker::Get().Access(from, size, false, __builtin_return_address(0));
  Checker::Get().Access(to, size, true, __builtin_return_address(0));
  return std::memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  Checker::Get().Access(to, size, true, __builtin_return_address(0));
  return std::memset(to, value, size);
}
void __tsan_init() {}

}  // extern "C"

#endif  // JFM_CHECKER
