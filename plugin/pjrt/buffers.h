// Buffers of the host as a running plan sees them. How custom calls get at their memory is
// in hosts/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

  // Its memory is written: nobody need wait.
  void NoteWritten() { is_ready_ = true; }

  // What the host calls the pointer to its memory. Only of a buffer that was waited for:
  // hosts abort or lie where it is not there yet.
  Result<void*> Pointer() const;
  // That of hosts where it is an address that stays as it is, to be asked for once.
  void NoteAddress(void* address) { address_ = address; }
  void* address() const { return address_; }

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

// Waits for an event of the host and destroys it. Null is a wrong answer of the function
// that gave it.
Status AwaitEvent(const Host& host, PJRT_Event* event, Slot giver);

// Null is fine. A handle that cannot be destroyed is the host's affair.
void DestroyBuffer(const Host& host, PJRT_Buffer* buffer);

// A new handle of the host for the plan to own.
BufferRef OwnBuffer(const Device& device, PJRT_Buffer* handle);

}  // namespace jfm::pjrt
