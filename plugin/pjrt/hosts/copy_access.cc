// Copies in and out: two per operand and result, and right with every host.
#include <algorithm>
#include <string>
#include <utility>

#include "plugin/pjrt/hosts/buffer_access.h"
#include "plugin/pjrt/plan.h"

namespace jfm::pjrt {
namespace {

std::string ShapeText(const int64_t* dims, size_t num_dims) {
  std::string text;
  for (size_t i = 0; i < num_dims; ++i) {
    text += (text.empty() ? "" : ", ") + std::to_string(dims[i]);
  }
  return "(" + text + ")";
}

// A copy of a smaller array would leave the rest undefined, and nobody would know.
Status CheckShape(const Host& host, PJRT_Buffer* buffer, const TensorType& type) {
  PJRT_Buffer_Dimensions_Args args = {};
  args.buffer = buffer;
  if (Status status = host.Call(args); !status.ok()) return status;
  if (args.dims == nullptr && args.num_dims > 0) {
    return WrongAnswer(args.kSlot, "gave no dimensions");
  }
  if (std::equal(type.dims.begin(), type.dims.end(), args.dims, args.dims + args.num_dims)) {
    return {};
  }
  return WrongAnswer(args.kSlot,
                     "says that an array has the shape " + ShapeText(args.dims, args.num_dims) +
                         " where the program has " + ShapeText(type.dims.data(), type.dims.size()));
}

class Copying final : public BufferAccess {
 public:
  Result<CallMemory> Read(const Device& device, const BufferRef& buffer,
                          const TensorType& type) const override {
    if (Status status = buffer->Await(); !status.ok()) return status;
    if (Status status = CheckShape(*device.host, buffer->handle(), type); !status.ok()) {
      return status;
    }
    Result<StagingMemory> staging = CopyFromHost(*device.host, buffer->handle(), type.size_bytes());
    if (!staging.ok()) return staging.status();
    CallMemory memory;
    memory.data = staging->get();
    memory.buffer = buffer;
    memory.staging = std::move(*staging);
    memory.may_hold_result = true;
    return memory;
  }

  Result<CallMemory> NewResult(const Device&, const TensorType& type) const override {
    Result<StagingMemory> staging = NewStaging(type.size_bytes());
    if (!staging.ok()) return staging.status();
    CallMemory memory;
    memory.data = staging->get();
    memory.staging = std::move(*staging);
    return memory;
  }

  Result<BufferRef> Finish(const Device& device, const TensorType& type,
                           CallMemory memory) const override {
    Result<PJRT_Buffer*> buffer = CopyToHost(device, memory.data, BufferTypeOf(type.dtype),
                                             type.dims.data(), type.dims.size());
    if (!buffer.ok()) return buffer.status();
    return OwnBuffer(device, *buffer);
  }
};

}  // namespace

const BufferAccess& CopyAccess() {
  static const Copying& access = *new Copying;
  return access;
}

}  // namespace jfm::pjrt
