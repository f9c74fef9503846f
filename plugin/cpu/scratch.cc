#include "plugin/cpu/scratch.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "plugin/host_cpu.h"

namespace jfm::cpu {
namespace {

constexpr size_t kAlignment = 64;               // a cache line, and the widest register
constexpr size_t kMinBytes = size_t{64} << 10;  // so that one buffer serves many calls
constexpr int kMaxKept = 128;

// Of what is kept. Found once: to ask the system for the CPUs takes a part of a small call.
struct Limits {
  size_t buffer_bytes;  // all threads of a call share a buffer: up to 1.5 MB each
  size_t all_bytes;
  int num_buffers;
};
const Limits& KeptLimits() {
  static const Limits limits = [] {
    const int num_cpus = NumCpus();
    const size_t buffer_bytes = (size_t{2} << 20) * static_cast<size_t>(std::max(2, num_cpus));
    return Limits{buffer_bytes, 4 * buffer_bytes, std::min(2 * num_cpus, kMaxKept)};
  }();
  return limits;
}

struct Kept {
  char* data = nullptr;
  size_t size_bytes = 0;
};

// Whoever does not get the mutex at once goes without: a thread may hold it when another one
// forks, and in the child nobody would ever release it.
std::mutex mutex;  // protects the following
Kept kept[kMaxKept];
int num_kept = 0;
size_t all_kept_bytes = 0;

Kept TakeAt(int i) {
  const Kept taken = kept[i];
  kept[i] = kept[--num_kept];
  all_kept_bytes -= taken.size_bytes;
  return taken;
}

// The smallest kept buffer that is large enough; null data: none.
Kept Take(size_t size_bytes) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  int best = -1;
  for (int i = 0; i < num_kept; ++i) {
    if (kept[i].size_bytes < size_bytes) continue;
    if (best < 0 || kept[i].size_bytes < kept[best].size_bytes) best = i;
  }
  return best < 0 ? Kept{} : TakeAt(best);
}

// Keeps the buffer, or returns another one that is to be freed: the smaller of two, because
// the larger one serves for both.
Kept Keep(Kept buffer) {
  const Limits& limits = KeptLimits();
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return buffer;
  Kept freed;
  if (num_kept >= limits.num_buffers || all_kept_bytes + buffer.size_bytes > limits.all_bytes) {
    int smallest = 0;
    for (int i = 1; i < num_kept; ++i) {
      if (kept[i].size_bytes < kept[smallest].size_bytes) smallest = i;
    }
    if (num_kept == 0 || kept[smallest].size_bytes >= buffer.size_bytes) return buffer;
    freed = TakeAt(smallest);
    if (all_kept_bytes + buffer.size_bytes > limits.all_bytes) {
      std::swap(freed, buffer);
    }
  }
  kept[num_kept++] = buffer;
  all_kept_bytes += buffer.size_bytes;
  return freed;
}

// A power of two for sizes that are kept: few different ones, which fit each other's calls.
size_t RoundUp(size_t size_bytes) {
  const size_t max = KeptLimits().buffer_bytes;
  if (size_bytes > max) return size_bytes;
  size_t rounded = kMinBytes;
  while (rounded < size_bytes) rounded *= 2;
  return std::min(rounded, max);
}

}  // namespace

Scratch::Scratch(size_t size_bytes) noexcept : data_(nullptr), size_bytes_(RoundUp(size_bytes)) {
  if (size_bytes_ <= KeptLimits().buffer_bytes) {
    const Kept found = Take(size_bytes_);
    if (found.data != nullptr) {
      data_ = found.data;
      size_bytes_ = found.size_bytes;
      return;
    }
  }
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, size_bytes_) == 0) data_ = static_cast<char*>(data);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  Kept freed = {data_, size_bytes_};
  if (size_bytes_ <= KeptLimits().buffer_bytes) freed = Keep(freed);
  std::free(freed.data);
}

}  // namespace jfm::cpu
