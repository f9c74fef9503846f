// Hosts whose pointers are addresses: operands where they are, results where the host will
// have them, or copied where it cannot say where that is.
#include <string>
#include <utility>

#include "plugin/pjrt/hosts/buffer_access.h"
#include "plugin/pjrt/plan.h"

namespace jfm::pjrt {
namespace {

// XLA's CPU promises 64 bytes; handlers that we know of need what C++ needs for the type.
uintptr_t AlignmentOf(const TensorType& type) {
  const int32_t buffer_type = BufferTypeOf(type.dtype);
  const bool is_complex = buffer_type == PJRT_BufferType_C64 || buffer_type == PJRT_BufferType_C128;
  return static_cast<uintptr_t>(ElementBytes(type.dtype)) / (is_complex ? 2 : 1);
}

// Of an array that is not empty.
Status CheckAddress(const void* address, const TensorType& type) {
  constexpr Slot kSlot = Slot::kBuffer_OpaqueDeviceMemoryDataPointer;
  const uintptr_t alignment = AlignmentOf(type);
  if (address == nullptr) {
    return WrongAnswer(
        kSlot, "gave no address for an array of " + std::to_string(type.size_bytes()) + " bytes");
  }
  if (const uintptr_t beyond = reinterpret_cast<uintptr_t>(address) % alignment; beyond != 0) {
    return WrongAnswer(kSlot, "gave an address that is " + std::to_string(beyond) +
                                  " bytes past a multiple of " + std::to_string(alignment) +
                                  ", which the array's elements need");
  }
  return {};
}

// An error if the host says that the buffer has fewer bytes than the program says. Hosts
// that do not say (the call is Unimplemented) are believed.
Status CheckSize(const Host& host, PJRT_Buffer* buffer, const TensorType& type) {
  if (IsPacked(type)) return {};  // fewer bytes than elements, by the host's own rule
  PJRT_Buffer_OnDeviceSizeInBytes_Args args = {};
  args.buffer = buffer;
  if (!host.Has(args.kSlot) || !host.Call(args).ok()) return {};
  const auto expected = static_cast<size_t>(type.size_bytes());
  if (args.on_device_size_in_bytes >= expected) return {};
  return WrongAnswer(args.kSlot,
                     "says that a buffer has " + std::to_string(args.on_device_size_in_bytes) +
                         " bytes where the program has an array of " + std::to_string(expected));
}

class Addressing final : public BufferAccess {
 public:
  enum class Results { kInPlace, kByCopy };
  explicit Addressing(Results results) : results_(results) {}

  Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                          const TensorType& type) const override {
    CallMemory memory;
    memory.buffer = buffer;
    memory.may_hold_result = results_ == Results::kInPlace;
    memory.data = buffer->address();
    if (memory.data != nullptr) return memory;
    if (Status status = buffer->Await(); !status.ok()) return status;
    if (type.size_bytes() == 0) return memory;
    if (results_ == Results::kByCopy) {
      // Such a host's address may be that of a temporary, which the reference keeps.
      Result<ExternalReference> reference = ExternalReference::Take(*device.host, buffer->handle());
      if (!reference.ok()) return reference.status();
      memory.reference = std::move(*reference);
    }
    Result<void*> address = buffer->Pointer();
    if (!address.ok()) return address.status();
    if (Status status = CheckAddress(*address, type); !status.ok()) return status;
    if (Status status = CheckSize(*device.host, buffer->handle(), type); !status.ok()) {
      return status;
    }
    if (results_ == Results::kInPlace) buffer->NoteAddress(*address);
    memory.data = *address;
    return memory;
  }

  Result<CallMemory> NewResult(const Device& device, const TensorType& type) const override {
    if (results_ == Results::kByCopy) return CopyAccess().NewResult(device, type);
    RowMajorLayout layout(type.dims.size());
    PJRT_Client_CreateUninitializedBuffer_Args args = {};
    args.client = device.client;
    args.shape_dims = type.dims.data();
    args.shape_num_dims = type.dims.size();
    args.shape_element_type = BufferTypeOf(type.dtype);
    args.shape_layout = layout.get();
    args.device = device.device;
    if (Status status = device.host->Call(args); !status.ok()) return status;
    if (args.buffer == nullptr) return WrongAnswer(args.kSlot, "gave no buffer");
    // Reading waits until the host is done with whatever had the memory before.
    return Read(device, OwnBuffer(device, args.buffer), type);
  }

  Result<BufferRef> Finish(const Device& device, const TensorType& type,
                           CallMemory memory) const override {
    if (results_ == Results::kByCopy) return CopyAccess().Finish(device, type, std::move(memory));
    return std::move(memory.buffer);
  }

 private:
  const Results results_;
};

}  // namespace

Result<ExternalReference> ExternalReference::Take(const Host& host, PJRT_Buffer* buffer) {
  PJRT_Buffer_IncreaseExternalReferenceCount_Args args = {};
  args.buffer = buffer;
  if (Status status = host.Call(args); !status.ok()) return status;
  ExternalReference reference;
  reference.host_ = &host;
  reference.buffer_ = buffer;
  return reference;
}

ExternalReference::~ExternalReference() {
  if (buffer_ == nullptr) return;
  PJRT_Buffer_DecreaseExternalReferenceCount_Args args = {};
  args.buffer = buffer_;
  (void)host_->Call(args);  // the host's affair; nobody could act on it
}

const BufferAccess& AddressAccess() {
  static const Addressing& access = *new Addressing(Addressing::Results::kInPlace);
  return access;
}

const BufferAccess& AddressAndCopyAccess() {
  static const Addressing& access = *new Addressing(Addressing::Results::kByCopy);
  return access;
}

Result<BufferRef> CopyBuffer(const Device& device, const BufferAccess& access,
                             const BufferRef& buffer, const TensorType& type) {
  if (device.memory != nullptr) {
    PJRT_Buffer_CopyToMemory_Args args = {};
    args.buffer = buffer->handle();
    args.dst_memory = device.memory;
    if (Status status = device.host->Call(args); !status.ok()) return status;
    if (args.dst_buffer == nullptr) return WrongAnswer(args.kSlot, "gave no buffer");
    return OwnBuffer(device, args.dst_buffer);
  }
  Result<CallMemory> source = access.Read(device, buffer, type);
  if (!source.ok()) return source.status();
  Result<CallMemory> target = access.NewResult(device, type);
  if (!target.ok()) return target.status();
  if (type.size_bytes() > 0) {  // else the addresses may be null
    std::memcpy(target->data, source->data, static_cast<size_t>(type.size_bytes()));
  }
  return access.Finish(device, type, std::move(*target));
}

}  // namespace jfm::pjrt
