// One memory per device of the host, kind "device"; everything that mentions a memory is
// translated to the device that has it.
#include "plugin/pjrt/old_host.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/buffers.h"
#include "plugin/pjrt/error.h"
#include "plugin/pjrt/host.h"
#include "plugin/pjrt/hosts/host_copies.h"
#include "plugin/pjrt/plugin.h"

namespace jfm::pjrt {

const int64_t kOldHostStablehloVersion[3] = {0, 19, 4};

namespace {

constexpr char kMemoryKind[] = "device";
constexpr size_t kMemoryKindSize = sizeof(kMemoryKind) - 1;
constexpr char kMemoryText[] = "Memory(kind=device, id=0)";

// -- Memories -------------------------------------------------------------------------

// What a caller attaches to a memory. A caller of the version that we advertise for an old
// host has no way to get here, but a newer one need not look at the version.
struct UserDatum {
  void* data;
  void (*destroy)(void*);
};

struct DeviceMemory : PJRT_Memory {
  PJRT_Memory* self;  // where lists of one memory point to
  PJRT_Device* device;
  std::mutex mutex;  // guards user_data
  std::unordered_map<const void*, UserDatum> user_data;
};

void* GetUserData(PJRT_Memory* memory, const void* key) {
  DeviceMemory& own = *static_cast<DeviceMemory*>(memory);
  std::lock_guard<std::mutex> lock(own.mutex);
  const auto found = own.user_data.find(key);
  return found == own.user_data.end() ? nullptr : found->second.data;
}

void SetUserData(PJRT_Memory* memory, const void* key, void* data, void (*destroy)(void*)) {
  DeviceMemory& own = *static_cast<DeviceMemory*>(memory);
  UserDatum old = {};
  {
    std::lock_guard<std::mutex> lock(own.mutex);
    old = std::exchange(own.user_data[key], UserDatum{data, destroy});
  }
  if (old.destroy != nullptr) old.destroy(old.data);
}

const PJRT_MemoryFunctions kMemoryFunctions = {sizeof(PJRT_MemoryFunctions), nullptr,
                                               sizeof(PJRT_Memory), GetUserData, SetUserData};

// Made when it is first asked for; never destroyed, as callers keep it as long as they like.
DeviceMemory& MemoryOf(PJRT_Device* device) {
  static std::mutex mutex;
  static auto& memories = *new std::unordered_map<PJRT_Device*, std::unique_ptr<DeviceMemory>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<DeviceMemory>& memory = memories[device];
  if (memory == nullptr) {
    memory = std::make_unique<DeviceMemory>();
    memory->functions = &kMemoryFunctions;
    memory->self = memory.get();
    memory->device = device;
  }
  return *memory;
}

const DeviceMemory& Own(const PJRT_Memory* memory) {
  return *static_cast<const DeviceMemory*>(memory);
}

Status ClientAddressableMemories(const Host& host, PJRT_Client_AddressableMemories_Args& args) {
  PJRT_Client_AddressableDevices_Args devices = {};
  devices.client = args.client;
  if (Status status = host.Call(devices); !status.ok()) return status;
  // AddClient() made sure that there is one device.
  args.addressable_memories = &MemoryOf(devices.addressable_devices[0]).self;
  args.num_addressable_memories = 1;
  return {};
}

Status DeviceAddressableMemories(const Host&, PJRT_Device_AddressableMemories_Args& args) {
  args.memories = &MemoryOf(args.device).self;
  args.num_memories = 1;
  return {};
}

Status DeviceDefaultMemory(const Host&, PJRT_Device_DefaultMemory_Args& args) {
  args.memory = &MemoryOf(args.device);
  return {};
}

Status MemoryId(const Host&, PJRT_Memory_Id_Args& args) {
  args.id = 0;
  return {};
}

Status MemoryKind(const Host&, PJRT_Memory_Kind_Args& args) {
  args.kind = kMemoryKind;
  args.kind_size = kMemoryKindSize;
  return {};
}

Status MemoryDebugString(const Host&, PJRT_Memory_DebugString_Args& args) {
  args.debug_string = kMemoryText;
  args.debug_string_size = sizeof(kMemoryText) - 1;
  return {};
}

Status MemoryToString(const Host&, PJRT_Memory_ToString_Args& args) {
  args.to_string = kMemoryText;
  args.to_string_size = sizeof(kMemoryText) - 1;
  return {};
}

Status MemoryAddressableByDevices(const Host&, PJRT_Memory_AddressableByDevices_Args& args) {
  args.devices = &Own(args.memory).device;
  args.num_devices = 1;
  return {};
}

Status BufferMemory(const Host& host, PJRT_Buffer_Memory_Args& args) {
  PJRT_Buffer_Device_Args device = {};
  device.buffer = args.buffer;
  if (Status status = host.Call(device); !status.ok()) return status;
  args.memory = &MemoryOf(device.device);
  return {};
}

Status OutputMemoryKinds(const Host& host, PJRT_Executable_OutputMemoryKinds_Args& args) {
  // The same for all executables with as many outputs; callers read them at any time.
  struct Kinds {
    std::vector<const char*> names;
    std::vector<size_t> sizes;
  };
  static std::mutex mutex;
  static auto& kinds_by_count = *new std::map<size_t, Kinds>;

  PJRT_Executable_NumOutputs_Args outputs = {};
  outputs.executable = args.executable;
  if (Status status = host.Call(outputs); !status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex);
  Kinds& kinds = kinds_by_count[outputs.num_outputs];
  kinds.names.resize(outputs.num_outputs, kMemoryKind);
  kinds.sizes.resize(outputs.num_outputs, kMemoryKindSize);
  args.num_outputs = outputs.num_outputs;
  args.memory_kinds = kinds.names.data();
  args.memory_kind_sizes = kinds.sizes.data();
  return {};
}

// -- Buffers --------------------------------------------------------------------------

// jax-metal aborts the process for host memory at another address.
constexpr uintptr_t kHostAlignment = 4;

// Bytes of one element in the host's memory, where those of less than a byte take one.
int64_t ElementSize(int32_t type) {
  switch (type) {
    case PJRT_BufferType_S16:
    case PJRT_BufferType_U16:
    case PJRT_BufferType_F16:
    case PJRT_BufferType_BF16:
      return 2;
    case PJRT_BufferType_S32:
    case PJRT_BufferType_U32:
    case PJRT_BufferType_F32:
      return 4;
    case PJRT_BufferType_S64:
    case PJRT_BufferType_U64:
    case PJRT_BufferType_F64:
    case PJRT_BufferType_C64:
      return 8;
    case PJRT_BufferType_C128:
      return 16;
    default:
      return 1;
  }
}

// The bytes, relative to `data`, that an array of the caller takes.
struct Extent {
  int64_t begin = 0;
  int64_t end = 0;
};
Extent ExtentOf(const PJRT_Client_BufferFromHostBuffer_Args& args) {
  const int64_t element_size = ElementSize(args.type);
  Extent extent = {0, element_size};
  int64_t dense_stride = element_size;
  for (size_t i = args.num_dims; i-- > 0;) {
    if (args.dims[i] == 0) return {};
    const int64_t stride = args.num_byte_strides != 0 ? args.byte_strides[i] : dense_stride;
    const int64_t last = (args.dims[i] - 1) * stride;
    (last < 0 ? extent.begin : extent.end) += last;
    dense_stride *= args.dims[i];
  }
  return extent;
}

Status BufferFromHostBuffer(const Host& host, PJRT_Client_BufferFromHostBuffer_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  PJRT_Client_BufferFromHostBuffer_Args own = args;
  if (own.memory != nullptr) own.device = Own(own.memory).device;
  own.memory = nullptr;
  StagingMemory staging;
  if (reinterpret_cast<uintptr_t>(own.data) % kHostAlignment != 0) {
    const Extent extent = ExtentOf(own);
    // Up to kHostAlignment - 1 bytes in front, so that `data` itself is aligned.
    const int64_t front = (-extent.begin + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
    Result<StagingMemory> memory = NewStaging(front + extent.end);
    if (!memory.ok()) return memory.status();
    staging = std::move(*memory);
    char* data = static_cast<char*>(staging.get()) + front;
    std::memcpy(data + extent.begin, static_cast<const char*>(own.data) + extent.begin,
                static_cast<size_t>(extent.end - extent.begin));
    own.data = data;
    // Our copy goes away with this call.
    own.host_buffer_semantics = PJRT_HostBufferSemantics_ImmutableOnlyDuringCall;
  }
  if (Status status = host.Call(own); !status.ok()) return status;
  if (own.buffer == nullptr) return WrongAnswer(own.kSlot, "gave no buffer");
  args.done_with_host_buffer = own.done_with_host_buffer;
  args.buffer = own.buffer;
  return {};
}

// XLA of that time refuses a copy from a device to itself, so it goes through the host.
Result<PJRT_Buffer*> CopyThroughHost(const Host& host, PJRT_Buffer* buffer, PJRT_Device* device) {
  const std::shared_ptr<const ClientState> client = FindClientOf(device);
  if (client == nullptr) return InvalidArgument("the device to copy to has no client.");
  PJRT_Buffer_ElementType_Args type = {};
  type.buffer = buffer;
  if (Status status = host.Call(type); !status.ok()) return status;
  PJRT_Buffer_Dimensions_Args dimensions = {};
  dimensions.buffer = buffer;
  if (Status status = host.Call(dimensions); !status.ok()) return status;
  RowMajorLayout layout(dimensions.num_dims);
  PJRT_Buffer_ToHostBuffer_Args size = {};
  size.src = buffer;
  size.host_layout = layout.get();
  // Without a destination it says how large that must be.
  if (Status status = host.Call(size); !status.ok()) return status;
  Result<StagingMemory> content =
      CopyFromHost(host, buffer, static_cast<int64_t>(size.dst_size), layout.get());
  if (!content.ok()) return content.status();
  Device target = client->device;
  target.device = device;
  return CopyToHost(target, content->get(), type.type, dimensions.dims, dimensions.num_dims);
}

Status BufferCopyToDevice(const Host& host, PJRT_Buffer_CopyToDevice_Args& args) {
  Result<PJRT_Buffer*> copy = CopyThroughHost(host, args.buffer, args.dst_device);
  if (!copy.ok()) return copy.status();
  args.dst_buffer = *copy;
  return {};
}

Status BufferCopyToMemory(const Host& host, PJRT_Buffer_CopyToMemory_Args& args) {
  Result<PJRT_Buffer*> copy = CopyThroughHost(host, args.buffer, Own(args.dst_memory).device);
  if (!copy.ok()) return copy.status();
  args.dst_buffer = *copy;
  return {};
}

// -- The table ------------------------------------------------------------------------

template <class Args, Status (*kFunction)(const Host&, Args&)>
PJRT_Error* Entry(void* args) {
  return NewError(WithoutExceptions(
      [&] { return kFunction(*ThePlugin()->host, *static_cast<Args*>(args)); }));
}

template <class Args, Status (*kFunction)(const Host&, Args&)>
constexpr SlotFunction Row() {
  return {Args::kSlot, Entry<Args, kFunction>};
}

}  // namespace

std::vector<SlotFunction> OldHostFunctions() {
  return {
      Row<PJRT_Client_AddressableMemories_Args, ClientAddressableMemories>(),
      Row<PJRT_Client_BufferFromHostBuffer_Args, BufferFromHostBuffer>(),
      Row<PJRT_Device_AddressableMemories_Args, DeviceAddressableMemories>(),
      Row<PJRT_Device_DefaultMemory_Args, DeviceDefaultMemory>(),
      Row<PJRT_Memory_Id_Args, MemoryId>(),
      Row<PJRT_Memory_Kind_Args, MemoryKind>(),
      Row<PJRT_Memory_DebugString_Args, MemoryDebugString>(),
      Row<PJRT_Memory_ToString_Args, MemoryToString>(),
      Row<PJRT_Memory_AddressableByDevices_Args, MemoryAddressableByDevices>(),
      Row<PJRT_Executable_OutputMemoryKinds_Args, OutputMemoryKinds>(),
      Row<PJRT_Buffer_Memory_Args, BufferMemory>(),
      Row<PJRT_Buffer_CopyToDevice_Args, BufferCopyToDevice>(),
      Row<PJRT_Buffer_CopyToMemory_Args, BufferCopyToMemory>(),
  };
}

}  // namespace jfm::pjrt
