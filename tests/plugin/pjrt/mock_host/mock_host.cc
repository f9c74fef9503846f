// A PJRT host plugin for tests: it answers as jax-metal 0.1.1 does (API 0.47, no memories,
// no attributes, an old StableHLO reader, device pointers that are handles), strictly, and
// executes through the CPU plugin that JFM_MOCK_HOST_BACKEND names. Used behind our plugin
// only: no jaxlib of today would take it directly.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plugin/pjrt/pjrt_api.h"

using namespace jfm::pjrt;  // NOLINT: one file, about nothing else

namespace {

constexpr int kMinor = 47;
// Its table ends with Client_TopologyDescription: a struct_size of 808 bytes.
constexpr size_t kMockSlots = static_cast<size_t>(Slot::kClient_TopologyDescription) + 1;
static_assert(kApiHeaderSize + kMockSlots * sizeof(PJRT_Function) == 808, "jax-metal's table");

constexpr int kInvalidArgument = 3;
constexpr int kUnknown = 2;
constexpr int kNotFound = 5;
constexpr int kUnimplemented = 12;
constexpr int kInternal = 13;

const PJRT_Api* backend = nullptr;

// -- Errors ---------------------------------------------------------------------------

// No table of functions in front: whoever looks for one finds no address.
struct MockError {
  uint64_t not_an_address = 0x4d4f434b4d4f434b;
  int32_t code;
  std::string text;
};

PJRT_Error* Error(int code, std::string text) {
  MockError* error = new MockError;
  error->code = code;
  error->text = std::move(text);
  return reinterpret_cast<PJRT_Error*>(error);
}
PJRT_Error* Unsupported(const char* what) {
  return Error(kUnimplemented, std::string(what) + " is not supported.");
}

// The backend's struct may be longer than the caller's, which is of this host's version.
struct Padded {
  explicit Padded(const void* args) {
    std::memcpy(&size, args, sizeof(size));
    std::memcpy(bytes, args, std::min(size, sizeof(bytes)));
    const size_t padded = sizeof(bytes);
    std::memcpy(bytes, &padded, sizeof(padded));
    // What callers chain to arguments is for newer plugins.
    std::memset(bytes + offsetof(PJRT_Error_Destroy_Args, extensions), 0, sizeof(void*));
  }
  void CopyBack(void* args) {
    const size_t start = offsetof(PJRT_Error_Destroy_Args, error);
    if (size > start) {
      std::memcpy(static_cast<char*>(args) + start, bytes + start, size - start);
    }
  }
  size_t size;
  alignas(16) char bytes[256] = {};
};

PJRT_Error* CallBackend(Slot slot, void* args) {
  Padded padded(args);
  PJRT_Error* error = backend->slots[static_cast<size_t>(slot)](padded.bytes);
  padded.CopyBack(args);
  return error;
}

PJRT_Error* TakeError(PJRT_Error* theirs) {
  if (theirs == nullptr) return nullptr;
  PJRT_Error_GetCode_Args code = {sizeof(code), nullptr, theirs, 0};
  CallBackend(Slot::kError_GetCode, &code);
  PJRT_Error_Message_Args message = {sizeof(message), nullptr, theirs, nullptr, 0};
  CallBackend(Slot::kError_Message, &message);
  PJRT_Error* error = Error(code.code, std::string(message.message, message.message_size));
  PJRT_Error_Destroy_Args destroy = {sizeof(destroy), nullptr, theirs};
  CallBackend(Slot::kError_Destroy, &destroy);
  return error;
}

template <class Args>
PJRT_Error* ToBackend(Args* args) {
  return TakeError(CallBackend(Args::kSlot, args));
}

// As every plugin of that time checks: a longer struct is a newer caller's and fine.
PJRT_Error* CheckSize(const void* args, size_t expected) {
  size_t size;
  std::memcpy(&size, args, sizeof(size));
  if (size >= expected) return nullptr;
  return Error(kInvalidArgument, "Unexpected arguments: expected " + std::to_string(expected) +
                                     " bytes, got " + std::to_string(size) +
                                     ". The plugin is likely built with a later version than the "
                                     "framework.");
}

template <int kSlot>
PJRT_Error* Forward(void* args) {
  if (PJRT_Error* error = CheckSize(args, 2 * sizeof(void*))) return error;
  return TakeError(CallBackend(static_cast<Slot>(kSlot), args));
}

PJRT_Error* ErrorDestroy(PJRT_Error_Destroy_Args* args) {
  delete reinterpret_cast<MockError*>(args->error);
  return nullptr;
}
PJRT_Error* ErrorMessage(PJRT_Error_Message_Args* args) {
  const MockError* error = reinterpret_cast<const MockError*>(args->error);
  args->message = error->text.c_str();
  args->message_size = error->text.size();
  return nullptr;
}
PJRT_Error* ErrorGetCode(PJRT_Error_GetCode_Args* args) {
  args->code = reinterpret_cast<const MockError*>(args->error)->code;
  return nullptr;
}

struct EventCallback {
  PJRT_EventCallback callback;
  void* user_arg;
};
void RunEventCallback(PJRT_Error* theirs, void* arg) {
  const EventCallback* wrapped = static_cast<EventCallback*>(arg);
  wrapped->callback(TakeError(theirs), wrapped->user_arg);
  delete wrapped;
}
PJRT_Error* EventOnReady(PJRT_Event_OnReady_Args* args) {
  PJRT_Event_OnReady_Args own = *args;
  own.callback = RunEventCallback;
  own.user_arg = new EventCallback{args->callback, args->user_arg};
  return ToBackend(&own);
}

// -- Client and devices ---------------------------------------------------------------

const char kPlatformName[] = "METAL";
const char kPlatformVersion[] = "0.1.1 (mock)";

PJRT_Error* PluginAttributes(PJRT_Plugin_Attributes_Args* args) {
  args->attributes = nullptr;
  args->num_attributes = 0;
  return nullptr;
}

PJRT_Error* ClientCreate(PJRT_Client_Create_Args* args) {
  PJRT_NamedValue one_device = {};
  one_device.struct_size = sizeof(one_device);
  one_device.name = "cpu_device_count";
  one_device.name_size = std::strlen(one_device.name);
  one_device.type = PJRT_NamedValueType_Int64;
  one_device.int64_value = 1;
  one_device.value_size = 1;
  PJRT_Client_Create_Args own = {};
  own.struct_size = sizeof(own);
  own.create_options = &one_device;
  own.num_options = 1;
  PJRT_Error* error = ToBackend(&own);
  args->client = own.client;
  return error;
}

PJRT_Error* ClientPlatformName(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = kPlatformName;
  args->platform_name_size = sizeof(kPlatformName) - 1;
  return nullptr;
}
PJRT_Error* TopologyPlatformName(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = kPlatformName;
  args->platform_name_size = sizeof(kPlatformName) - 1;
  return nullptr;
}
PJRT_Error* ClientPlatformVersion(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = kPlatformVersion;
  args->platform_version_size = sizeof(kPlatformVersion) - 1;
  return nullptr;
}

PJRT_Error* ClientMemories(PJRT_Client_AddressableMemories_Args* args) {
  args->addressable_memories = nullptr;
  args->num_addressable_memories = 0;
  return nullptr;
}
PJRT_Error* DeviceMemories(PJRT_Device_AddressableMemories_Args* args) {
  args->memories = nullptr;
  args->num_memories = 0;
  return nullptr;
}
PJRT_Error* DefaultMemory(void*) { return Unsupported("default_memory_space"); }
PJRT_Error* BufferMemory(void*) { return Unsupported("Buffer_Memory"); }
PJRT_Error* OutputMemoryKinds(void*) { return Unsupported("GetOutputMemoryKinds"); }
PJRT_Error* MemoryStats(void*) { return Unsupported("GetAllocatorStats"); }
PJRT_Error* ForeignMemory(void*) {
  return Error(kInternal, "mock host: it gave out no memories, so whose is this?");
}

// -- Programs -------------------------------------------------------------------------

// Reads the numbers and strings of MLIR's bytecode format.
class BytecodeReader {
 public:
  BytecodeReader(const char* data, size_t size) : data_(data), size_(size) {}

  // The producer's name, "" for what is not bytecode.
  std::string Producer() {
    if (size_ < 4 || std::memcmp(data_, "ML\xefR", 4) != 0) return "";
    position_ = 4;
    Number();  // format version
    std::string producer;
    while (position_ < size_ && data_[position_] != 0) producer += data_[position_++];
    ++position_;
    return producer;
  }

  // Every string of the program: names of dialects, operations and attributes, texts. To
  // be called after Producer().
  std::vector<std::string> Strings() {
    while (position_ < size_) {
      const uint8_t id = static_cast<uint8_t>(data_[position_++]);
      const uint64_t length = Number();
      if (id & 0x80) {
        Number();  // alignment, and padding up to it
        while (position_ < size_ && static_cast<uint8_t>(data_[position_]) == 0xcb) ++position_;
      }
      if ((id & 0x7f) == 0) return StringSection(length);
      position_ += length;
    }
    return {};
  }

 private:
  // A number's first byte says by its trailing zero bits how many bytes follow.
  uint64_t Number() {
    if (position_ >= size_) return 0;
    int bytes = 1;
    for (uint8_t first = data_[position_]; bytes < 9 && (first & 1) == 0; first >>= 1) ++bytes;
    uint64_t value = 0;
    const size_t skipped = bytes == 9 ? 1 : 0;
    const size_t end = std::min(position_ + bytes, size_);
    std::memcpy(&value, data_ + position_ + skipped, end - position_ - skipped);
    position_ = end;
    return bytes == 9 ? value : value >> bytes;
  }

  // The lengths come first, last string first; each includes a zero byte.
  std::vector<std::string> StringSection(uint64_t section_size) {
    size_t end = std::min<size_t>(position_ + section_size, size_);
    std::vector<std::string> strings(std::min<uint64_t>(Number(), section_size));
    for (std::string& string : strings) {
      const uint64_t length = Number();
      if (length == 0 || length > end - position_) return {};
      end -= length;
      string.assign(data_ + end, length - 1);
    }
    return strings;
  }

  const char* data_;
  size_t size_;
  size_t position_ = 0;
};

bool StartsWith(const std::string& text, const char* start) {
  return text.compare(0, std::strlen(start), start) == 0;
}

// Custom calls that XLA's CPU backend or jaxlib know and jax-metal does not. What neither
// knows, the backend refuses.
bool IsForeignTarget(const std::string& name) {
  static const char* const kTargets[] = {"SPMDFullToShardShape", "SPMDShardToFullShape",
                                         "TopK", "PartialReduce", "mhlo.acos", "mhlo.asinh",
                                         "mhlo.sinh", "mhlo.cosh", "mhlo.ragged_dot"};
  for (const char* target : kTargets) {
    if (name == target) return true;
  }
  return (StartsWith(name, "lapack_") && name != "lapack_sgetrf") ||
         StartsWith(name, "xla.sdy.") || StartsWith(name, "xla_ffi_") ||
         StartsWith(name, "xla_python_") || StartsWith(name, "jax_flash_metal");
}

bool Contains(const std::vector<std::string>& strings, const char* string) {
  return std::find(strings.begin(), strings.end(), string) != strings.end();
}

PJRT_Error* NotLegal(const std::string& operation) {
  return Error(kUnknown, "failed to legalize operation '" + operation + "'");
}

PJRT_Error* ClientCompile(PJRT_Client_Compile_Args* args) {
  if (PJRT_Error* error = CheckSize(args, sizeof(*args))) return error;
  const PJRT_Program& program = *args->program;
  if (std::string(program.format, program.format_size) != "mlir") {
    return Error(kInvalidArgument, "METAL only supports MLIR format input.");
  }
  BytecodeReader reader(program.code, program.code_size);
  const std::string producer = reader.Producer();
  int major = 0, minor = 0, patch = 0;
  if (std::sscanf(producer.c_str(), "StableHLO_v%d.%d.%d", &major, &minor, &patch) != 3) {
    return Error(kInvalidArgument, "mock host: the program is no portable StableHLO artifact.");
  }
  if (std::make_pair(major, std::make_pair(minor, patch)) >
      std::make_pair(0, std::make_pair(19, 4))) {
    return Error(kInvalidArgument, "Failed to deserialize " + producer + ", newest is 0.19.4");
  }
  const std::vector<std::string> strings = reader.Strings();
  if (strings.empty()) return Error(kInvalidArgument, "mock host: no strings in the bytecode.");
  if (Contains(strings, "composite_v1")) return NotLegal("mhlo.composite");
  if (Contains(strings, "sdy")) {
    return Error(kInvalidArgument, "dialect 'sdy' is unknown. If this is called for a bytecode "
                                   "file, consider enabling unregistered dialects");
  }
  const bool has_custom_calls = Contains(strings, "custom_call_v1");
  if (has_custom_calls && std::any_of(strings.begin(), strings.end(), IsForeignTarget)) {
    return NotLegal("mhlo.custom_call");
  }
  PJRT_Error* error = ToBackend(args);
  if (error == nullptr || !has_custom_calls) return error;
  const int code = reinterpret_cast<MockError*>(error)->code;
  if (code != kNotFound && code != kUnimplemented) return error;
  delete reinterpret_cast<MockError*>(error);
  return NotLegal("mhlo.custom_call");
}

PJRT_Error* AheadOfTimeCompile(void*) { return Unsupported("Compile without a client"); }
PJRT_Error* Serialize(void*) { return Unsupported("SerializeExecutable"); }
PJRT_Error* Deserialize(void*) { return Unsupported("DeserializeExecutable"); }
PJRT_Error* CostAnalysis(void*) { return Unsupported("GetCostAnalysis"); }
PJRT_Error* OptimizedProgram(void*) { return Unsupported("GetHloModules"); }

PJRT_Error* Execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (PJRT_Error* error = CheckSize(args, sizeof(*args))) return error;
  if (PJRT_Error* error = CheckSize(args->options, offsetof(PJRT_ExecuteOptions, context))) {
    return error;
  }
  Padded options(args->options);
  // What 0.47 does not know, it does not look at.
  std::memset(options.bytes + offsetof(PJRT_ExecuteOptions, context), 0,
              sizeof(options.bytes) - offsetof(PJRT_ExecuteOptions, context));
  PJRT_LoadedExecutable_Execute_Args own = *args;
  own.options = reinterpret_cast<PJRT_ExecuteOptions*>(options.bytes);
  return ToBackend(&own);
}

// -- Buffers --------------------------------------------------------------------------

// Or jaxlib would read device memory where it is.
PJRT_Error* IsOnCpu(PJRT_Buffer_IsOnCpu_Args* args) {
  args->is_on_cpu = false;
  return nullptr;
}

// Handles stand for device memory as id<MTLBuffer> does: odd numbers, no addresses.
struct Handles {
  std::mutex mutex;
  uintptr_t next = 0x6d74'0001;
  std::map<PJRT_Buffer*, uintptr_t> of_buffer;
  std::map<uintptr_t, void*> addresses;
};
Handles& TheHandles() {
  static Handles* handles = new Handles;  // never destroyed: callbacks may come late
  return *handles;
}

PJRT_Error* HandleOf(PJRT_Buffer* buffer, uintptr_t* handle) {
  PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args args = {};
  args.struct_size = sizeof(args);
  args.buffer = buffer;
  if (PJRT_Error* error = ToBackend(&args)) return error;
  Handles& handles = TheHandles();
  std::lock_guard<std::mutex> lock(handles.mutex);
  uintptr_t& known = handles.of_buffer[buffer];
  if (known == 0) {
    known = handles.next;
    handles.next += 2;
  }
  handles.addresses[known] = args.device_memory_ptr;
  *handle = known;
  return nullptr;
}
PJRT_Error* UnsafePointer(PJRT_Buffer_UnsafePointer_Args* args) {
  return HandleOf(args->buffer, &args->buffer_pointer);
}
PJRT_Error* OpaquePointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args* args) {
  uintptr_t handle = 0;
  PJRT_Error* error = HandleOf(args->buffer, &handle);
  args->device_memory_ptr = reinterpret_cast<void*>(handle);
  return error;
}

struct DeleteCallback {
  void (*callback)(void*, void*);
  void* handle;
  void* user_arg;
};
void RunDeleteCallback(void*, void* arg) {
  const DeleteCallback* wrapped = static_cast<DeleteCallback*>(arg);
  if (wrapped->callback != nullptr) wrapped->callback(wrapped->handle, wrapped->user_arg);
  delete wrapped;
}
PJRT_Error* CreateView(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  if (args->stream != 0) return Error(kInternal, "mock host: no stream has this handle.");
  void* address = nullptr;
  {
    Handles& handles = TheHandles();
    std::lock_guard<std::mutex> lock(handles.mutex);
    auto found = handles.addresses.find(reinterpret_cast<uintptr_t>(args->device_buffer_ptr));
    if (found == handles.addresses.end()) {
      return Error(kInternal, "mock host: a view of what is no device buffer; Apple's crashes.");
    }
    address = found->second;
  }
  PJRT_Client_CreateViewOfDeviceBuffer_Args own = *args;
  own.struct_size = sizeof(own);
  own.device_buffer_ptr = address;
  own.memory = nullptr;
  own.on_delete_callback = RunDeleteCallback;
  own.on_delete_callback_arg = new DeleteCallback{args->on_delete_callback, args->device_buffer_ptr,
                                                  args->on_delete_callback_arg};
  PJRT_Error* error = ToBackend(&own);
  args->buffer = own.buffer;
  return error;
}

PJRT_Error* BufferDestroy(PJRT_Buffer_Destroy_Args* args) {
  {
    Handles& handles = TheHandles();
    std::lock_guard<std::mutex> lock(handles.mutex);
    auto found = handles.of_buffer.find(args->buffer);
    if (found != handles.of_buffer.end()) {
      handles.addresses.erase(found->second);
      handles.of_buffer.erase(found);
    }
  }
  return ToBackend(args);
}

PJRT_Error* FromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args* args) {
  if (PJRT_Error* error = CheckSize(args, sizeof(*args))) return error;
  if (args->memory != nullptr) return ForeignMemory(args);
  if (args->device == nullptr) return Error(kInvalidArgument, "mock host: no device is given.");
  if (reinterpret_cast<uintptr_t>(args->data) % 4 != 0) {
    return Error(kInternal, "mock host: the host buffer is not 4-byte aligned; Apple's aborts.");
  }
  return ToBackend(args);
}

PJRT_Error* CopyToDevice(void*) {
  return Error(kInvalidArgument,
               "CopyToDevice cannot accept the same source and destination devices");
}

// -- The table ------------------------------------------------------------------------

template <class Args>
void Set(PJRT_Api* api, PJRT_Error* (*function)(Args*)) {
  api->slots[static_cast<size_t>(Args::kSlot)] = reinterpret_cast<PJRT_Function>(function);
}
void Set(PJRT_Api* api, Slot slot, PJRT_Function function) {
  api->slots[static_cast<size_t>(slot)] = function;
}

template <int... kSlots>
void ForwardAll(PJRT_Api* api, std::integer_sequence<int, kSlots...>) {
  ((api->slots[kSlots] = Forward<kSlots>), ...);
}

void FillIn(PJRT_Api* api) {
  ForwardAll(api, std::make_integer_sequence<int, static_cast<int>(kMockSlots)>());
  Set(api, ErrorDestroy);
  Set(api, ErrorMessage);
  Set(api, ErrorGetCode);
  Set(api, EventOnReady);
  Set(api, PluginAttributes);
  Set(api, ClientCreate);
  Set(api, ClientPlatformName);
  Set(api, TopologyPlatformName);
  Set(api, ClientPlatformVersion);
  Set(api, ClientMemories);
  Set(api, DeviceMemories);
  Set(api, Slot::kDevice_DefaultMemory, DefaultMemory);
  Set(api, Slot::kBuffer_Memory, BufferMemory);
  Set(api, Slot::kExecutable_OutputMemoryKinds, OutputMemoryKinds);
  Set(api, Slot::kDevice_MemoryStats, MemoryStats);
  for (Slot slot : {Slot::kMemory_Id, Slot::kMemory_Kind, Slot::kMemory_DebugString,
                    Slot::kMemory_ToString, Slot::kMemory_AddressableByDevices,
                    Slot::kBuffer_CopyToMemory}) {
    Set(api, slot, ForeignMemory);
  }
  Set(api, ClientCompile);
  Set(api, Slot::kCompile, AheadOfTimeCompile);
  Set(api, Slot::kExecutable_Serialize, Serialize);
  Set(api, Slot::kExecutable_DeserializeAndLoad, Deserialize);
  Set(api, Slot::kExecutable_GetCostAnalysis, CostAnalysis);
  Set(api, Slot::kExecutable_OptimizedProgram, OptimizedProgram);
  Set(api, Execute);
  Set(api, IsOnCpu);
  Set(api, UnsafePointer);
  Set(api, OpaquePointer);
  Set(api, CreateView);
  Set(api, BufferDestroy);
  Set(api, FromHostBuffer);
  Set(api, Slot::kBuffer_CopyToDevice, CopyToDevice);
}

const PJRT_Api* LoadBackend() {
  const char* path = std::getenv("JFM_MOCK_HOST_BACKEND");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  using GetApi = const PJRT_Api* (*)();
  const GetApi get_api =
      library ? reinterpret_cast<GetApi>(dlsym(library, "GetPjrtApi")) : nullptr;
  if (get_api == nullptr) {
    std::fprintf(stderr, "mock host: JFM_MOCK_HOST_BACKEND names no PJRT plugin: %s\n",
                 path ? path : "(unset)");
    return nullptr;
  }
  return get_api();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  static const PJRT_Api* const mock = []() -> const PJRT_Api* {
    backend = LoadBackend();
    if (backend == nullptr) return nullptr;
    static PJRT_Api api = {};
    api.struct_size = kApiHeaderSize + kMockSlots * sizeof(PJRT_Function);
    api.version.struct_size = sizeof(api.version);
    api.version.minor = kMinor;
    FillIn(&api);
    return &api;
  }();
  return mock;
}
