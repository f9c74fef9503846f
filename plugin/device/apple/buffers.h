// MTLBuffers as Buffers: allocated, pooled, somebody else's, and over host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "plugin/device/apple/objc.h"
#include "plugin/device/device.h"

namespace jfm::apple {

// `size_bytes` of an MTLBuffer, from `offset` on.
class AppleBuffer : public Buffer {
 public:
  AppleBuffer(Ref object, size_t size_bytes, size_t offset = 0)
      : object_(std::move(object)), size_bytes_(size_bytes), offset_(offset) {}
  ~AppleBuffer() override;
  size_t size_bytes() const override { return size_bytes_; }
  void* native() const override { return object_.get(); }
  id object() const { return object_.get(); }
  size_t offset() const { return offset_; }
  // Called when all commands that used it are complete, and well.
  virtual void Finish() const {}

 protected:
  Ref object_;

 private:
  const size_t size_bytes_, offset_;
};

// The memory that is kept between calls: allocating and wiring it anew costs more than a
// small kernel. Bounded, oldest out first.
class ScratchPool {
 public:
  explicit ScratchPool(uint64_t max_idle_bytes) : max_idle_bytes_(max_idle_bytes) {}
  // One of at least `size_bytes` and at most twice that, and its true size; or none.
  std::pair<Ref, size_t> Take(size_t size_bytes);
  void Give(Ref buffer, size_t size_bytes);
  void Clear();

 private:
  const uint64_t max_idle_bytes_;
  std::mutex mutex_;                          // protects the rest
  std::vector<std::pair<Ref, size_t>> idle_;  // oldest first
  uint64_t idle_bytes_ = 0;
};

// Makes buffers of one device. Outlives them.
class Allocator {
 public:
  // Both outlive it.
  Allocator(id device, const DeviceFacts& facts);

  Result<std::unique_ptr<Buffer>> Scratch(size_t size_bytes);
  Result<std::unique_ptr<Buffer>> Private(size_t size_bytes);
  Result<std::unique_ptr<Buffer>> WrapHost(void* data, size_t size_bytes, Access access);
  Result<std::unique_ptr<Buffer>> WrapNative(id object, size_t size_bytes);

 private:
  Result<Ref> NewBuffer(size_t size_bytes, NSUInteger options);
  Ref Alias(uintptr_t begin, uintptr_t end);

  const id device_;
  const DeviceFacts& facts_;
  const uintptr_t page_bytes_;
  ScratchPool pool_;
};

}  // namespace jfm::apple
