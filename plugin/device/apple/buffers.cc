// Allocation with one retry, page-rounded aliases of host memory, and copies where Metal
// cannot alias.
#include "plugin/device/apple/buffers.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/selectors.h"

namespace jfm::apple {
namespace {

constexpr uint64_t kMaxIdleBytes = uint64_t{1} << 30;

class ScratchBuffer : public AppleBuffer {
 public:
  ScratchBuffer(Ref object, size_t size_bytes, size_t true_size_bytes, ScratchPool& pool)
      : AppleBuffer(std::move(object), size_bytes),
        true_size_bytes_(true_size_bytes),
        pool_(pool) {}
  ~ScratchBuffer() override {
    Pool pool;
    pool_.Give(std::move(object_), true_size_bytes_);
  }

 private:
  const size_t true_size_bytes_;
  ScratchPool& pool_;
};

// Over host memory: an alias of it, or a copy. `copy_to`: where the content goes when it is
// complete, null for aliases and operands.
class HostBuffer : public AppleBuffer {
 public:
  HostBuffer(Ref object, size_t size_bytes, size_t offset, void* copy_to)
      : AppleBuffer(std::move(object), size_bytes, offset), copy_to_(copy_to) {}
  void* native() const override { return nullptr; }
  void Finish() const override {
    if (copy_to_ != nullptr) std::memcpy(copy_to_, send::contents(object()), size_bytes());
  }

 private:
  void* const copy_to_;
};

template <class T, class... Args>
std::unique_ptr<Buffer> Make(Args&&... args) {
  return std::make_unique<T>(std::forward<Args>(args)...);
}

}  // namespace

AppleBuffer::~AppleBuffer() {
  Pool pool;
  object_ = Ref();
}

std::pair<Ref, size_t> ScratchPool::Take(size_t size_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it) {
    const bool fits = it->second >= size_bytes && it->second / 2 <= size_bytes;
    if (fits && (best == idle_.end() || it->second < best->second)) best = it;
  }
  if (best == idle_.end()) return {Ref(), 0};
  std::pair<Ref, size_t> taken = std::move(*best);
  idle_.erase(best);
  idle_bytes_ -= taken.second;
  return taken;
}

void ScratchPool::Give(Ref buffer, size_t size_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.emplace_back(std::move(buffer), size_bytes);
  idle_bytes_ += size_bytes;
  auto end = idle_.begin();
  for (; idle_bytes_ > max_idle_bytes_; ++end) idle_bytes_ -= end->second;
  idle_.erase(idle_.begin(), end);
}

void ScratchPool::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
}

Allocator::Allocator(id device, const DeviceFacts& facts)
    : device_(device),
      facts_(facts),
      page_bytes_(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE))),
      pool_(std::min(kMaxIdleBytes, facts.memory_limit_bytes / 8)) {}

Result<Ref> Allocator::NewBuffer(size_t size_bytes, NSUInteger options) {
  // Metal has no buffers of no bytes.
  const size_t length = std::max<size_t>(size_bytes, 16);
  if (length <= facts_.max_buffer_bytes) {
    for (bool is_retry : {false, true}) {
      if (is_retry) pool_.Clear();
      Ref buffer = Ref::Adopt(send::newBufferWithLength(device_, length, options));
      if (buffer) return buffer;
    }
  }
  return Status(
      Code::kResourceExhausted,
      "out of memory: " + facts_.name + " has no buffer of " + std::to_string(size_bytes) +
          " bytes; one may have up to " + std::to_string(facts_.max_buffer_bytes) +
          " and all together should stay below " + std::to_string(facts_.memory_limit_bytes) + ".");
}

Result<std::unique_ptr<Buffer>> Allocator::Scratch(size_t size_bytes) {
  Pool pool;
  auto [object, true_size_bytes] = pool_.Take(size_bytes);
  if (!object) {
    Result<Ref> made = NewBuffer(size_bytes, constants::kPrivateStorage);
    if (!made.ok()) return made.status();
    object = std::move(*made);
    true_size_bytes = size_bytes;
  }
  return Make<ScratchBuffer>(std::move(object), size_bytes, true_size_bytes, pool_);
}

Result<std::unique_ptr<Buffer>> Allocator::Private(size_t size_bytes) {
  Pool pool;
  Result<Ref> object = NewBuffer(size_bytes, constants::kPrivateStorage);
  if (!object.ok()) return object.status();
  return Make<AppleBuffer>(std::move(*object), size_bytes);
}

// Null where Metal will not have it. Apple documents this for memory of one VM region, as of
// mmap or vm_allocate; what malloc gave may be anything. So we take no alias at its word:
// virtual machines were seen to give buffers of no bytes.
Ref Allocator::Alias(uintptr_t begin, uintptr_t end) {
  if (end - begin > facts_.max_buffer_bytes) return Ref();
  void* const memory = reinterpret_cast<void*>(begin);
  Ref alias = Ref::Adopt(send::newBufferWithBytesNoCopy(device_, memory, end - begin,
                                                        constants::kSharedStorage, nullptr));
  const bool is_alias = send::length(alias.get()) == end - begin &&  // 0 of nil
                        send::contents(alias.get()) == memory;
  return is_alias ? std::move(alias) : Ref();
}

Result<std::unique_ptr<Buffer>> Allocator::WrapHost(void* data, size_t size_bytes, Access access) {
  Pool pool;
  if (data == nullptr && size_bytes > 0) {
    return InvalidArgument("host memory of " + std::to_string(size_bytes) +
                           " bytes must have an address, but got a null pointer.");
  }
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = address & ~(page_bytes_ - 1);
  if (size_bytes >= page_bytes_) {
    // Metal aliases whole pages. What else lies on the first and the last is not touched.
    const uintptr_t end = (address + size_bytes + page_bytes_ - 1) & ~(page_bytes_ - 1);
    if (Ref alias = Alias(begin, end)) {
      return Make<HostBuffer>(std::move(alias), size_bytes, address - begin, nullptr);
    }
  }
  Result<Ref> copy = NewBuffer(size_bytes, constants::kSharedStorage);
  if (!copy.ok()) return copy.status();
  if (size_bytes == 0) return Make<HostBuffer>(std::move(*copy), 0, 0, nullptr);
  // Results too: what lies between their rows is written back as it was.
  std::memcpy(send::contents(copy->get()), data, size_bytes);
  return Make<HostBuffer>(std::move(*copy), size_bytes, 0,
                          access == Access::kResult ? data : nullptr);
}

Result<std::unique_ptr<Buffer>> Allocator::WrapNative(id object, size_t size_bytes) {
  Pool pool;
  if (object == nullptr) {
    if (size_bytes == 0) return Private(0);
    return InvalidArgument("a Metal buffer of " + std::to_string(size_bytes) +
                           " bytes was expected, but got a null pointer.");
  }
  // Under Metal's debugging layers a device is wrapped, and not always in the same object.
  const id device = send::device(object);
  if (device != device_ && send::registryID(device) != send::registryID(device_)) {
    return InvalidArgument("a Metal buffer of " + facts_.name +
                           " was expected, but got one of another device.");
  }
  const NSUInteger length = send::length(object);
  if (length < size_bytes) {
    return InvalidArgument("a Metal buffer of at least " + std::to_string(size_bytes) +
                           " bytes was expected, but got one of " + std::to_string(length) + ".");
  }
  return Make<AppleBuffer>(Ref::Retain(object), size_bytes);
}

}  // namespace jfm::apple
