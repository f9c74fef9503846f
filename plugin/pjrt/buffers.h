// Buffers of the host as a running plan sees them, and how custom calls get at their
// memory: what that takes differs from host to host, and this is the one place for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "plugin/pjrt/custom_call/types.h"
#include "plugin/pjrt/host.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// One client of the host. Plans run on its only device.
struct Device {
  const Host* host = nullptr;
  PJRT_Client* client = nullptr;
  PJRT_Device* device = nullptr;
  PJRT_Memory* memory = nullptr;  // the host's default memory; null: it has no such notion
};

// A handle that a plan owns, or one of its caller's that it only borrows.
class HostBuffer {
 public:
  enum class Owner { kPlan, kCaller, kCallerDonates };

  HostBuffer(const Host& host, PJRT_Buffer* handle, Owner owner);
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  PJRT_Buffer* handle() const { return handle_; }
  bool is_owned() const { return owner_ == Owner::kPlan; }
  // Whether its memory may be reused, when nobody else refers to it.
  bool is_expendable() const { return owner_ != Owner::kCaller; }

  // The host was given it to read: it may do so until long after. What the host writes
  // itself waits for that, but a handler that writes into the memory cannot.
  void NoteReader() { may_have_readers_ = true; }
  bool may_have_readers() const { return may_have_readers_; }

  // Gives the handle away; only of an owned buffer.
  PJRT_Buffer* Release();

  // Waits until it is written: the error of whatever was to write it.
  Status Await();

  // Of hosts whose memory has addresses: asked for once. Waits first.
  Result<void*> Address();

 private:
  const Host& host_;
  PJRT_Buffer* handle_;
  const Owner owner_;
  // Atomic: executions share the buffers of a program's constants.
  std::atomic<bool> is_ready_{false};
  std::atomic<void*> address_{nullptr};
  std::atomic<bool> may_have_readers_{false};
};
// The count of references says whether a plan still needs a buffer elsewhere.
using BufferRef = std::shared_ptr<HostBuffer>;

// Handles that plans own at the moment; for tests.
int64_t NumLiveBuffers();

// The row-major layout of a shape, as the API wants it.
class RowMajorLayout {
 public:
  explicit RowMajorLayout(size_t rank);
  RowMajorLayout(const RowMajorLayout&) = delete;
  RowMajorLayout& operator=(const RowMajorLayout&) = delete;
  PJRT_MemoryLayout* get() { return &layout_; }

 private:
  std::vector<int64_t> minor_to_major_;
  PJRT_MemoryLayout layout_ = {};
};

// Waits for an event of the host and destroys it; null is ready.
Status AwaitEvent(const Host& host, PJRT_Event* event);

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
using StagingMemory = std::unique_ptr<void, FreeMemory>;
// Host memory as aligned as XLA's own; never null, not for an empty array either.
Result<StagingMemory> NewStaging(int64_t size_bytes);

// Memory that a handler reads or writes; `staging` is set where it is a copy.
struct CallMemory {
  void* data = nullptr;
  BufferRef buffer;
  StagingMemory staging;
};

// How the handlers' side of a host's memory works.
class BufferAccess {
 public:
  virtual ~BufferAccess() = default;
  // The bytes of an operand; waits for them.
  virtual Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                                  int64_t size_bytes) const = 0;
  // Memory for a result, with undefined content.
  virtual Result<CallMemory> NewResult(const Device& device, const TensorType& type) const = 0;
  // The result as a buffer, after the handler has written it.
  virtual Result<BufferRef> Finish(const Device& device, const TensorType& type,
                                   CallMemory memory) const = 0;
};

// Chosen by the host's identity, or by the setting ("address", "copy") when that is not
// "auto". An unknown host is refused: what its pointers mean cannot be guessed.
Result<const BufferAccess*> ChooseBufferAccess(const Host& host, const std::string& platform_name,
                                               const std::string& setting);

// A copy in a buffer of its own.
Result<BufferRef> CopyBuffer(const Device& device, const BufferAccess& access,
                             const BufferRef& buffer, const TensorType& type);

}  // namespace jfm::pjrt
