// Two ways to reach a host's memory: by address, and by copies, which every host allows.
#include "plugin/pjrt/buffers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "plugin/pjrt/plan.h"

namespace jfm::pjrt {
namespace {

std::atomic<int64_t> num_live_buffers{0};

constexpr size_t kAlignment = 64;  // XLA's own for host memory

BufferRef Own(const Device& device, PJRT_Buffer* handle) {
  return std::make_shared<HostBuffer>(*device.host, handle, HostBuffer::Owner::kPlan);
}

class AddressAccess final : public BufferAccess {
 public:
  Result<CallMemory> Read(const Device&, const BufferRef& buffer, int64_t) const override {
    Result<void*> address = buffer->Address();
    if (!address.ok()) return address.status();
    return CallMemory{*address, buffer, nullptr};
  }

  Result<CallMemory> NewResult(const Device& device, const TensorType& type) const override {
    RowMajorLayout layout(type.dims.size());
    PJRT_Client_CreateUninitializedBuffer_Args args = {};
    args.client = device.client;
    args.shape_dims = type.dims.data();
    args.shape_num_dims = type.dims.size();
    args.shape_element_type = BufferTypeOf(type.dtype);
    args.shape_layout = layout.get();
    args.device = device.device;
    if (Status status = device.host->Call(args); !status.ok()) return status;
    BufferRef buffer = Own(device, args.buffer);
    return Read(device, buffer, 0);
  }

  Result<BufferRef> Finish(const Device&, const TensorType&, CallMemory memory) const override {
    return std::move(memory.buffer);
  }
};

class CopyAccess final : public BufferAccess {
 public:
  Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                          int64_t size_bytes) const override {
    if (Status status = buffer->Await(); !status.ok()) return status;
    Result<StagingMemory> staging = NewStaging(size_bytes);
    if (!staging.ok()) return staging.status();
    PJRT_Buffer_ToHostBuffer_Args args = {};
    args.src = buffer->handle();
    args.dst = staging->get();
    args.dst_size = static_cast<size_t>(size_bytes);
    if (Status status = device.host->Call(args); !status.ok()) return status;
    if (Status status = AwaitEvent(*device.host, args.event); !status.ok()) return status;
    void* data = staging->get();
    return CallMemory{data, buffer, std::move(*staging)};
  }

  Result<CallMemory> NewResult(const Device&, const TensorType& type) const override {
    Result<StagingMemory> staging = NewStaging(type.size_bytes());
    if (!staging.ok()) return staging.status();
    void* data = staging->get();
    return CallMemory{data, nullptr, std::move(*staging)};
  }

  Result<BufferRef> Finish(const Device& device, const TensorType& type,
                           CallMemory memory) const override {
    PJRT_Client_BufferFromHostBuffer_Args args = {};
    args.client = device.client;
    args.data = memory.data;
    args.type = BufferTypeOf(type.dtype);
    args.dims = type.dims.data();
    args.num_dims = type.dims.size();
    args.host_buffer_semantics = PJRT_HostBufferSemantics_ImmutableOnlyDuringCall;
    args.device = device.device;
    if (Status status = device.host->Call(args); !status.ok()) return status;
    BufferRef buffer = Own(device, args.buffer);
    // Already ready by the semantics, but the event is ours to destroy.
    if (Status status = AwaitEvent(*device.host, args.done_with_host_buffer); !status.ok()) {
      return status;
    }
    return buffer;
  }
};

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
  if (handle_ == nullptr) return;
  PJRT_Buffer_Destroy_Args args = {};
  args.buffer = handle_;
  // A handle that cannot be destroyed is the host's affair; nobody could act on it.
  (void)host_.Call(args);
}

PJRT_Buffer* HostBuffer::Release() { return std::exchange(handle_, nullptr); }

Status HostBuffer::Await() {
  if (is_ready_) return {};
  PJRT_Buffer_ReadyEvent_Args args = {};
  args.buffer = handle_;
  if (Status status = host_.Call(args); !status.ok()) return status;
  if (Status status = AwaitEvent(host_, args.event); !status.ok()) return status;
  is_ready_ = true;
  return {};
}

Result<void*> HostBuffer::Address() {
  if (void* address = address_) return address;
  if (Status status = Await(); !status.ok()) return status;
  PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args args = {};
  args.buffer = handle_;
  if (Status status = host_.Call(args); !status.ok()) return status;
  address_ = args.device_memory_ptr;
  return args.device_memory_ptr;
}

Result<StagingMemory> NewStaging(int64_t size_bytes) {
  // aligned_alloc wants a multiple of the alignment; never null for an empty array.
  const size_t blocks = (static_cast<size_t>(size_bytes) + kAlignment - 1) / kAlignment;
  StagingMemory memory(std::aligned_alloc(kAlignment, std::max<size_t>(blocks, 1) * kAlignment));
  if (memory == nullptr) {
    return Status(Code::kResourceExhausted,
                  "out of host memory for " + std::to_string(size_bytes) + " bytes.");
  }
  return memory;
}

int64_t NumLiveBuffers() { return num_live_buffers.load(std::memory_order_relaxed); }

Status AwaitEvent(const Host& host, PJRT_Event* event) {
  if (event == nullptr) return {};
  PJRT_Event_Await_Args await = {};
  await.event = event;
  const Status status = host.Call(await);
  PJRT_Event_Destroy_Args destroy = {};
  destroy.event = event;
  const Status destroyed = host.Call(destroy);
  return status.ok() ? destroyed : status;
}

Result<const BufferAccess*> ChooseBufferAccess(const Host& host, const std::string& platform_name,
                                               const std::string& setting) {
  static const AddressAccess* by_address = new AddressAccess;
  static const CopyAccess* by_copy = new CopyAccess;
  // The platforms of the hosts that we know.
  static constexpr struct {
    const char* platform_name;
    bool has_addresses;
  } kKnownHosts[] = {{"cpu", true}};

  if (setting == "copy") return by_copy;
  bool has_addresses = setting == "address";
  if (setting == "auto") {
    const auto* known =
        std::find_if(std::begin(kKnownHosts), std::end(kKnownHosts),
                     [&](const auto& row) { return row.platform_name == platform_name; });
    if (known == std::end(kKnownHosts)) {
      return Status(Code::kFailedPrecondition,
                    "the host plugin's platform '" + platform_name +
                        "' is not known, so neither is what the pointers to its buffers mean; "
                        "JAX_FLASH_METAL_HOST_BUFFERS=copy works with every host.");
    }
    has_addresses = known->has_addresses;
  } else if (!has_addresses) {
    return InvalidArgument(
        "the host's buffers can be used by 'auto', 'address' or 'copy', but got '" + setting +
        "'.");
  }
  // Results are made by a function that the oldest hosts lack.
  if (has_addresses && host.Has(Slot::kClient_CreateUninitializedBuffer)) return by_address;
  return by_copy;
}

Result<BufferRef> CopyBuffer(const Device& device, const BufferAccess& access,
                             const BufferRef& buffer, const TensorType& type) {
  if (device.memory != nullptr) {
    PJRT_Buffer_CopyToMemory_Args args = {};
    args.buffer = buffer->handle();
    args.dst_memory = device.memory;
    if (Status status = device.host->Call(args); !status.ok()) return status;
    return Own(device, args.dst_buffer);
  }
  Result<CallMemory> source = access.Read(device, buffer, type.size_bytes());
  if (!source.ok()) return source.status();
  Result<CallMemory> target = access.NewResult(device, type);
  if (!target.ok()) return target.status();
  if (type.size_bytes() > 0) {  // else the addresses may be null
    std::memcpy(target->data, source->data, static_cast<size_t>(type.size_bytes()));
  }
  return access.Finish(device, type, std::move(*target));
}

}  // namespace jfm::pjrt
