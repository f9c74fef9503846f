// Used by handlers' copies (copy_access.cc) and for old hosts' (old_host.cc).
#include "plugin/pjrt/hosts/host_copies.h"

#include <algorithm>
#include <string>

namespace jfm::pjrt {
namespace {

constexpr size_t kAlignment = 64;  // XLA's own for host memory

}  // namespace

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

Result<StagingMemory> CopyFromHost(const Host& host, PJRT_Buffer* buffer, int64_t size_bytes,
                                   PJRT_MemoryLayout* layout) {
  Result<StagingMemory> staging = NewStaging(size_bytes);
  if (!staging.ok()) return staging.status();
  PJRT_Buffer_ToHostBuffer_Args args = {};
  args.src = buffer;
  args.host_layout = layout;
  args.dst = staging->get();
  args.dst_size = static_cast<size_t>(size_bytes);
  if (Status status = host.Call(args); !status.ok()) return status;
  if (Status status = AwaitEvent(host, args.event, args.kSlot); !status.ok()) return status;
  return staging;
}

Result<PJRT_Buffer*> CopyToHost(const Device& device, const void* data, int32_t buffer_type,
                                const int64_t* dims, size_t num_dims) {
  PJRT_Client_BufferFromHostBuffer_Args args = {};
  args.client = device.client;
  args.data = data;
  args.type = buffer_type;
  args.dims = dims;
  args.num_dims = num_dims;
  args.host_buffer_semantics = PJRT_HostBufferSemantics_ImmutableOnlyDuringCall;
  args.device = device.device;
  if (Status status = device.host->Call(args); !status.ok()) return status;
  // Already ready by the semantics, but the event is ours to destroy.
  Status status = AwaitEvent(*device.host, args.done_with_host_buffer, args.kSlot);
  if (status.ok() && args.buffer == nullptr) status = WrongAnswer(args.kSlot, "gave no buffer");
  if (!status.ok()) {
    DestroyBuffer(*device.host, args.buffer);
    return status;
  }
  return args.buffer;
}

}  // namespace jfm::pjrt
