// How custom calls get at a host's memory. What that takes differs from host to host:
// known_hosts.cc has the table, and one of the implementations here serves each row.
#pragma once

#include <cstdint>
#include <memory>

#include "plugin/device/device.h"
#include "plugin/pjrt/buffers.h"
#include "plugin/pjrt/custom_call/types.h"
#include "plugin/pjrt/hosts/host_copies.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// An external reference of the host's: it neither frees nor reuses the buffer's memory
// while there is one.
class ExternalReference {
 public:
  ExternalReference() = default;
  static Result<ExternalReference> Take(const Host& host, PJRT_Buffer* buffer);
  ~ExternalReference();
  ExternalReference(ExternalReference&& other) noexcept
      : host_(other.host_), buffer_(std::exchange(other.buffer_, nullptr)) {}
  ExternalReference& operator=(ExternalReference&& other) noexcept {
    std::swap(host_, other.host_);
    std::swap(buffer_, other.buffer_);
    return *this;
  }

 private:
  const Host* host_ = nullptr;
  PJRT_Buffer* buffer_ = nullptr;
};

// Memory that a handler reads or writes, with all that must be kept until it has returned.
// Destroyed in reverse order: the reference goes before the buffer.
struct CallMemory {
  void* data = nullptr;  // an address; or an object of the device, see NativeAccess()
  BufferRef buffer;      // of the host, whose memory `data` is or was copied from
  ExternalReference reference;
  StagingMemory staging;                   // where `data` is a copy
  std::unique_ptr<jfm::Buffer> allocated;  // where `data` is a result of our own device
  // Whether the memory of an operand that nobody needs may be that of a result.
  bool may_hold_result = false;
};

class BufferAccess {
 public:
  virtual ~BufferAccess() = default;
  // The bytes of an operand; waits until the host has written them.
  virtual Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                                  const TensorType& type) const = 0;
  // Memory for a result, with undefined content.
  virtual Result<CallMemory> NewResult(const Device& device, const TensorType& type) const = 0;
  // The result as a buffer, after the handler has written it and is done with it.
  virtual Result<BufferRef> Finish(const Device& device, const TensorType& type,
                                   CallMemory memory) const = 0;
};

// A buffer's pointer is an address of this process, and results are written where the host
// will have them (CreateUninitializedBuffer).
const BufferAccess& AddressAccess();
// The pointer is an address as long as an external reference is held; results are copied.
const BufferAccess& AddressAndCopyAccess();
// Copies in and out, which every host allows.
const BufferAccess& CopyAccess();
// The pointer is an object of the device (Buffer::native), borrowed; results are objects of
// ours that the host takes a view of. `data` is such an object, null for empty arrays.
const BufferAccess& NativeAccess();
// Whether NativeAccess() can work: this build's device has such objects.
bool HasNativeBuffers();

// What handlers of a host's programs get.
struct HostAccess {
  const BufferAccess* memory = nullptr;  // any handler, conditions of loops and branches
  const BufferAccess* native = nullptr;  // handlers that ask for it; null: the same as others
  const char* handover = "";             // in words, see jfm_pjrt_host_facts
  // Whether the host may reuse the memory of arguments that are given away. Where it has
  // views of ours it would put that among its own free memory, and free it once more.
  bool host_may_overwrite = true;
};

// A copy in a buffer of its own.
Result<BufferRef> CopyBuffer(const Device& device, const BufferAccess& access,
                             const BufferRef& buffer, const TensorType& type);

}  // namespace jfm::pjrt
