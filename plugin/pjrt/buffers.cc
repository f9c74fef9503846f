// Handles, their events and pointers.
#include "plugin/pjrt/buffers.h"

#include <utility>

namespace jfm::pjrt {
namespace {

std::atomic<int64_t> num_live_buffers{0};

}  // namespace

RowMajorLayout::RowMajorLayout(size_t rank) : minor_to_major_(rank) {
  for (size_t i = 0; i < rank; ++i) minor_to_major_[i] = static_cast<int64_t>(rank - 1 - i);
  layout_.struct_size = sizeof(layout_);
  layout_.tiled.struct_size = sizeof(layout_.tiled);
  layout_.tiled.minor_to_major = minor_to_major_.data();
  layout_.tiled.minor_to_major_size = rank;
}

HostBuffer::HostBuffer(const Host& host, PJRT_Buffer* handle, Owner owner)
    : host_(host), handle_(handle), owner_(owner) {
  if (is_owned()) num_live_buffers.fetch_add(1, std::memory_order_relaxed);
}

HostBuffer::~HostBuffer() {
  if (!is_owned()) return;
  num_live_buffers.fetch_sub(1, std::memory_order_relaxed);
  DestroyBuffer(host_, handle_);
}

PJRT_Buffer* HostBuffer::Release() { return std::exchange(handle_, nullptr); }

Status HostBuffer::Await() {
  if (is_ready_) return {};
  PJRT_Buffer_ReadyEvent_Args args = {};
  args.buffer = handle_;
  if (Status status = host_.Call(args); !status.ok()) return status;
  if (Status status = AwaitEvent(host_, args.event, args.kSlot); !status.ok()) return status;
  is_ready_ = true;
  return {};
}

Result<void*> HostBuffer::Pointer() const {
  PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args args = {};
  args.buffer = handle_;
  if (Status status = host_.Call(args); !status.ok()) return status;
  return args.device_memory_ptr;
}

int64_t NumLiveBuffers() { return num_live_buffers.load(std::memory_order_relaxed); }

Status AwaitEvent(const Host& host, PJRT_Event* event, Slot giver) {
  if (event == nullptr) return WrongAnswer(giver, "gave no event");
  PJRT_Event_Await_Args await = {};
  await.event = event;
  const Status status = host.Call(await);
  PJRT_Event_Destroy_Args destroy = {};
  destroy.event = event;
  const Status destroyed = host.Call(destroy);
  return status.ok() ? destroyed : status;
}

void DestroyBuffer(const Host& host, PJRT_Buffer* buffer) {
  if (buffer == nullptr) return;
  PJRT_Buffer_Destroy_Args args = {};
  args.buffer = buffer;
  (void)host.Call(args);
}

BufferRef OwnBuffer(const Device& device, PJRT_Buffer* handle) {
  return std::make_shared<HostBuffer>(*device.host, handle, HostBuffer::Owner::kPlan);
}

}  // namespace jfm::pjrt
