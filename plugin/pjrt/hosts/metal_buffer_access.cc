// Apple's jax-metal: what it calls a pointer to device memory is an id<MTLBuffer>, used
// from offset 0; private memory, so there is no address. Zero copies both ways. The order
// of waiting is in docs/pjrt.md. Whether an object is one of our device's and long enough
// is checked where it is wrapped (Device::WrapNative), in the handler.
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "plugin/device/default_device.h"
#include "plugin/pjrt/hosts/buffer_access.h"
#include "plugin/pjrt/plan.h"

namespace jfm::pjrt {
namespace {

// A buffer of ours that the host has a view of; goes when both sides are done with it.
class Lent {
 public:
  explicit Lent(std::unique_ptr<jfm::Buffer> buffer) : buffer_(std::move(buffer)) {}

  void* native() const { return buffer_->native(); }

  // The host's on_delete, on whatever thread. Its GPU work may still read the memory: it
  // is released, which leaves command buffers theirs, and never used for anything else.
  static void OnDelete(void*, void* lent) { static_cast<Lent*>(lent)->Drop(); }

  // Our side, when the host has its view.
  void Keep() { Drop(); }
  // Our side, when it has none. It may have called OnDelete or not, or still do so, so that
  // not this object but its buffer goes.
  void TakeBack() {
    buffer_.reset();
    Drop();
  }

 private:
  ~Lent() = default;
  void Drop() {
    if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  std::unique_ptr<jfm::Buffer> buffer_;
  std::atomic<int> owners_{2};
};

class Native final : public BufferAccess {
 public:
  Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                          const TensorType& type) const override {
    // First: recorded events are committed by the host, so this ends without our doing.
    if (Status status = buffer->Await(); !status.ok()) return status;
    CallMemory memory;
    memory.buffer = buffer;
    if (type.size_bytes() == 0) return memory;
    // Or the host could use the memory for its next operation before our kernels are done.
    Result<ExternalReference> reference = ExternalReference::Take(*device.host, buffer->handle());
    if (!reference.ok()) return reference.status();
    memory.reference = std::move(*reference);
    Result<void*> object = buffer->Pointer();
    if (!object.ok()) return object.status();
    constexpr Slot kSlot = Slot::kBuffer_OpaqueDeviceMemoryDataPointer;
    if (*object == nullptr) {
      return WrongAnswer(
          kSlot, "gave no object for an array of " + std::to_string(type.size_bytes()) + " bytes");
    }
    if (reinterpret_cast<uintptr_t>(*object) % alignof(void*) != 0) {
      return WrongAnswer(kSlot, "gave what cannot be an object, as its address is odd");
    }
    memory.data = *object;
    return memory;
  }

  Result<CallMemory> NewResult(const Device&, const TensorType& type) const override {
    CallMemory memory;
    if (type.size_bytes() == 0) return memory;
    Result<jfm::Device*> metal = DefaultDevice();
    if (!metal.ok()) return metal.status();
    Result<std::unique_ptr<jfm::Buffer>> buffer =
        (*metal)->Allocate(static_cast<size_t>(type.size_bytes()));
    if (!buffer.ok()) return buffer.status();
    memory.allocated = std::move(*buffer);
    memory.data = memory.allocated->native();
    return memory;
  }

  Result<BufferRef> Finish(const Device& device, const TensorType& type,
                           CallMemory memory) const override {
    // Nothing to view.
    if (memory.allocated == nullptr) {
      Result<CallMemory> nothing = CopyAccess().NewResult(device, type);
      if (!nothing.ok()) return nothing.status();
      return CopyAccess().Finish(device, type, std::move(*nothing));
    }
    RowMajorLayout layout(type.dims.size());
    Lent* const lent = new Lent(std::move(memory.allocated));
    PJRT_Client_CreateViewOfDeviceBuffer_Args args = {};
    args.client = device.client;
    args.device_buffer_ptr = lent->native();
    args.dims = type.dims.data();
    args.num_dims = type.dims.size();
    args.element_type = BufferTypeOf(type.dtype);
    args.layout = layout.get();
    args.device = device.device;
    args.on_delete_callback = Lent::OnDelete;
    args.on_delete_callback_arg = lent;
    args.stream = 0;  // none of the host's streams has a handle
    Status status = device.host->Call(args);
    if (status.ok() && args.buffer == nullptr) status = WrongAnswer(args.kSlot, "gave no buffer");
    if (!status.ok()) {
      lent->TakeBack();
      return status;
    }
    lent->Keep();
    BufferRef view = OwnBuffer(device, args.buffer);
    view->NoteWritten();
    return view;
  }
};

}  // namespace

const BufferAccess& NativeAccess() {
  static const Native& access = *new Native;
  return access;
}

bool HasNativeBuffers() {
  Result<jfm::Device*> device = DefaultDevice();
  if (!device.ok()) return false;
  Result<std::unique_ptr<jfm::Buffer>> buffer = (*device)->Allocate(1);
  return buffer.ok() && (*buffer)->native() != nullptr;
}

}  // namespace jfm::pjrt
