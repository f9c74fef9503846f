// A PJRT host plugin for tests: it answers as one of the Metal hosts does, and executes
// through the CPU plugin that JFM_MOCK_HOST_BACKEND names. JFM_MOCK_HOST_KIND says which:
// jax-metal (the default) is strict about programs too (API 0.47, an old StableHLO reader).
// Used behind our plugin only: no jaxlib of today would take that one directly.
//
// JFM_FAKE_METAL_LIBRARY: jax-metal's device memory is objects of that library.
// JFM_MOCK_HOST_FAULTS: wrong answers from the start, as mock_host_fault() takes them, each
// good for one call, separated by commas. JFM_MOCK_HOST_DELAY_MS: see control.h.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/plugin/pjrt/mock_host/backend.h"
#include "tests/plugin/pjrt/mock_host/control.h"
#include "tests/plugin/pjrt/mock_host/memory.h"

namespace mock {
namespace {

// -- Kinds ------------------------------------------------------------------------------

struct Kind {
  const char* name;
  const char* platform_name;
  const char* platform_version;
  int minor;
  Pointers pointers;
  std::vector<Slot> missing;        // null in the table
  std::vector<Slot> unimplemented;  // there, and an error
};

// jax-metal's table ends with Client_TopologyDescription: a struct_size of 808 bytes.
constexpr int kOldMinor = 47;
constexpr size_t kOldSlots = static_cast<size_t>(Slot::kClient_TopologyDescription) + 1;
static_assert(kApiHeaderSize + kOldSlots * sizeof(PJRT_Function) == 808, "jax-metal's table");

// Names and versions as in the binaries of jax-metal 0.1.1, metal-pjrt-core 0.0.5 (whose
// version is made at run time), metaljax 0.11.9 and jax-mps 0.11.1.
const std::vector<Kind>& Kinds() {
  static const auto& kinds = *new std::vector<Kind>{
      {"jax-metal", "METAL", "metal_0.5.1", kOldMinor, Pointers::kHandles, {}, {}},
      {"jax-graft", "mtl", "some version", 115, Pointers::kAddresses, {}, {}},
      {"metaljax",
       "metal",
       "metaljax-native-p0",
       115,
       Pointers::kTemporaries,
       {},
       {Slot::kClient_CreateUninitializedBuffer, Slot::kClient_CreateAliasBuffer,
        Slot::kClient_CreateErrorBuffer, Slot::kClient_CreateViewOfDeviceBuffer,
        Slot::kExecutable_DeserializeAndLoad}},
      {"jax-mps",
       "mps",
       "0.1.0",
       114,
       Pointers::kNull,
       {Slot::kClient_CreateUninitializedBuffer, Slot::kClient_CreateAliasBuffer,
        Slot::kClient_FulfillAliasBuffer, Slot::kClient_CreateViewOfDeviceBuffer},
       {}},
      // Nobody knows it.
      {"opaque", "opaque", "1", 115, Pointers::kHandles, {}, {}},
  };
  return kinds;
}
const Kind* kind = nullptr;
bool IsOld() { return kind->minor == kOldMinor; }

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
PJRT_Error* ErrorForEachPayload(void*) { return nullptr; }

// -- Client and devices ---------------------------------------------------------------

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
  args->platform_name = kind->platform_name;
  args->platform_name_size = std::strlen(kind->platform_name);
  return nullptr;
}
PJRT_Error* TopologyPlatformName(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = kind->platform_name;
  args->platform_name_size = std::strlen(kind->platform_name);
  return nullptr;
}
PJRT_Error* ClientPlatformVersion(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = kind->platform_version;
  args->platform_version_size = std::strlen(kind->platform_version);
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
  static const char* const kTargets[] = {"SPMDFullToShardShape",
                                         "SPMDShardToFullShape",
                                         "TopK",
                                         "PartialReduce",
                                         "mhlo.acos",
                                         "mhlo.asinh",
                                         "mhlo.sinh",
                                         "mhlo.cosh",
                                         "mhlo.ragged_dot"};
  for (const char* target : kTargets) {
    if (name == target) return true;
  }
  return (StartsWith(name, "lapack_") && name != "lapack_sgetrf") || StartsWith(name, "xla.sdy.") ||
         StartsWith(name, "xla_ffi_") || StartsWith(name, "xla_python_") ||
         StartsWith(name, "jax_flash_metal");
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
    return Error(kInvalidArgument,
                 "dialect 'sdy' is unknown. If this is called for a bytecode "
                 "file, consider enabling unregistered dialects");
  }
  const bool has_custom_calls = Contains(strings, "custom_call_v1");
  if (has_custom_calls && std::any_of(strings.begin(), strings.end(), IsForeignTarget)) {
    return NotLegal("mhlo.custom_call");
  }
  PJRT_Error* error = ToBackend(args);
  if (error == nullptr &&
      (Contains(strings, "tf.aliasing_output") || Contains(strings, "jax.buffer_donor"))) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.overwriting.insert(args->executable);
  }
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
  CheckViews(*args);
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

PJRT_Error* OnDeviceSize(void*) { return Unsupported("GetOnDeviceSizeInBytes"); }

// -- The table ------------------------------------------------------------------------

template <class Args>
void Set(PJRT_Api* api, PJRT_Error* (*function)(Args*)) {
  api->slots[static_cast<size_t>(Args::kSlot)] = reinterpret_cast<PJRT_Function>(function);
}
void Set(PJRT_Api* api, Slot slot, PJRT_Function function) {
  api->slots[static_cast<size_t>(slot)] = function;
}

PJRT_Error* NotSupported(void*) { return Unsupported("This function"); }

template <int... kSlots>
void ForwardAll(PJRT_Api* api, std::integer_sequence<int, kSlots...>) {
  const size_t count = (backend->struct_size - kApiHeaderSize) / sizeof(PJRT_Function);
  const auto forward = [&](size_t slot, PJRT_Function function) {
    if (slot < count && backend->slots[slot] != nullptr) api->slots[slot] = function;
  };
  (forward(kSlots, Forward<kSlots>), ...);
}

// What jax-metal 0.1.1 has not, or has in its own way.
void MakeOld(PJRT_Api* api) {
  std::fill(api->slots + kOldSlots, api->slots + kNumSlots, nullptr);
  Set(api, PluginAttributes);
  Set(api, ClientMemories);
  Set(api, DeviceMemories);
  Set(api, Slot::kDevice_DefaultMemory, DefaultMemory);
  Set(api, Slot::kBuffer_Memory, BufferMemory);
  Set(api, Slot::kExecutable_OutputMemoryKinds, OutputMemoryKinds);
  Set(api, Slot::kDevice_MemoryStats, MemoryStats);
  for (Slot slot :
       {Slot::kMemory_Id, Slot::kMemory_Kind, Slot::kMemory_DebugString, Slot::kMemory_ToString,
        Slot::kMemory_AddressableByDevices, Slot::kBuffer_CopyToMemory}) {
    Set(api, slot, ForeignMemory);
  }
  Set(api, ClientCompile);
  Set(api, Slot::kCompile, AheadOfTimeCompile);
  Set(api, Slot::kExecutable_Serialize, Serialize);
  Set(api, Slot::kExecutable_DeserializeAndLoad, Deserialize);
  Set(api, Slot::kExecutable_GetCostAnalysis, CostAnalysis);
  Set(api, Slot::kExecutable_OptimizedProgram, OptimizedProgram);
  Set(api, Slot::kBuffer_OnDeviceSizeInBytes, OnDeviceSize);
  Set(api, Execute);
  Set(api, FromHostBuffer);
  Set(api, Slot::kBuffer_CopyToDevice, CopyToDevice);
}

void FillInTable(PJRT_Api* api) {
  constexpr auto kAll = std::make_integer_sequence<int, static_cast<int>(kNumSlots)>();
  ForwardAll(api, kAll);
  Set(api, ErrorDestroy);
  Set(api, ErrorMessage);
  Set(api, ErrorGetCode);
  Set(api, Slot::kError_ForEachPayload, ErrorForEachPayload);
  Set(api, EventIsReady);
  Set(api, EventAwait);
  Set(api, EventDestroy);
  Set(api, EventOnReady);
  Set(api, ClientCreate);
  Set(api, ClientPlatformName);
  Set(api, TopologyPlatformName);
  Set(api, ClientPlatformVersion);
  Set(api, IsOnCpu);
  Set(api, ReadyEvent);
  Set(api, ToHostBuffer);
  Set(api, UnsafePointer);
  Set(api, OpaquePointer);
  Set(api, IncreaseReferences);
  Set(api, DecreaseReferences);
  Set(api, CreateView);
  Set(api, BufferDestroy);
  Set(api, BufferDelete);
  for (Slot slot : kind->missing) Set(api, slot, nullptr);
  for (Slot slot : kind->unimplemented) Set(api, slot, NotSupported);
  if (IsOld()) MakeOld(api);
  WatchAll(api, kAll);
}

bool LoadBackend() {
  const char* path = std::getenv("JFM_MOCK_HOST_BACKEND");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  using GetApi = const PJRT_Api* (*)();
  const GetApi get_api = library ? reinterpret_cast<GetApi>(dlsym(library, "GetPjrtApi")) : nullptr;
  if (get_api == nullptr) {
    std::fprintf(stderr, "mock host: JFM_MOCK_HOST_BACKEND names no PJRT plugin: %s\n",
                 path ? path : "(unset)");
    return false;
  }
  backend = get_api();
  return backend != nullptr;
}

bool ReadSettings() {
  const char* name = std::getenv("JFM_MOCK_HOST_KIND");
  for (const Kind& row : Kinds()) {
    if (std::strcmp(row.name, name == nullptr ? "jax-metal" : name) == 0) kind = &row;
  }
  if (kind == nullptr) {
    std::fprintf(stderr, "mock host: JFM_MOCK_HOST_KIND is unknown: %s\n", name);
    return false;
  }
  pointers = kind->pointers;
  const char* fake_metal = std::getenv("JFM_FAKE_METAL_LIBRARY");
  if (IsOld() && fake_metal != nullptr) {
    if (!LoadFakeMetal(fake_metal)) return false;
    pointers = Pointers::kObjects;
  }
  if (const char* delay = std::getenv("JFM_MOCK_HOST_DELAY_MS")) delay_ms = std::atoi(delay);
  const char* faults = std::getenv("JFM_MOCK_HOST_FAULTS");
  std::string rest = faults == nullptr ? "" : faults;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    if (!Arm(rest.substr(0, comma), 0, 1)) return false;
    rest.erase(0, comma + 1);
  }
  return true;
}

}  // namespace
}  // namespace mock

JFM_MOCK_EXPORT const jfm::pjrt::PJRT_Api* GetPjrtApi() {
  using namespace mock;
  static const PJRT_Api* const table = []() -> const PJRT_Api* {
    if (!ReadSettings() || !LoadBackend()) return nullptr;
    static PJRT_Api api = {};
    const size_t slots = IsOld() ? kOldSlots : kNumSlots;
    api.struct_size =
        std::min(kApiHeaderSize + slots * sizeof(PJRT_Function), backend->struct_size);
    api.version.struct_size = sizeof(api.version);
    api.version.minor = std::min(kind->minor, backend->version.minor);
    FillInTable(&api);
    return &api;
  }();
  return table;
}
