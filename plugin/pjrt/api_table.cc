// GetPjrtApi: the table of functions that JAX calls. Every slot that the host has is
// forwarded; the functions here are those that need more than that.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/buffer_uses.h"
#include "plugin/pjrt/compile.h"
#include "plugin/pjrt/custom_call/ffi_extension.h"
#include "plugin/pjrt/dispatch.h"
#include "plugin/pjrt/error.h"
#include "plugin/pjrt/old_host.h"
#include "plugin/pjrt/plugin.h"
#include "plugin/pjrt/profiler.h"
#include "plugin/pjrt/work_queue.h"

namespace jfm::pjrt {
namespace {

const Host& TheHost() { return *ThePlugin()->host; }

// Lets the host answer a call of our caller's.
template <class Args>
Status AskHost(Args& args) {
  return TheHost().TakeError(TheHost().Forward(Args::kSlot, &args));
}

// -- Errors ---------------------------------------------------------------------------
// Those of the host reach a caller only from functions of its extensions.

void ErrorDestroy(PJRT_Error_Destroy_Args& args) {
  if (IsOurError(args.error)) return DestroyError(args.error);
  TheHost().Forward(Slot::kError_Destroy, &args);
}

void ErrorGetMessage(PJRT_Error_Message_Args& args) {
  if (IsOurError(args.error)) return ErrorMessage(args.error, &args.message, &args.message_size);
  TheHost().Forward(Slot::kError_Message, &args);
}

void ErrorGetCode(PJRT_Error_GetCode_Args& args) {
  if (IsOurError(args.error)) {
    args.code = ErrorCode(args.error);
    return;
  }
  TheHost().Forward(Slot::kError_GetCode, &args);
}

void ErrorForEachPayload(PJRT_Error_ForEachPayload_Args& args) {
  if (!IsOurError(args.error)) TheHost().Forward(Slot::kError_ForEachPayload, &args);
}

// -- Plugin and events ----------------------------------------------------------------

// Loading the host has done this.
Status PluginInitialize(PJRT_Plugin_Initialize_Args&) { return {}; }

Status PluginAttributes(PJRT_Plugin_Attributes_Args& args) {
  // jaxlib 0.4.34 gives a struct_size that ends before num_attributes, which it then reads:
  // a struct of our own, and both members copied.
  PJRT_Plugin_Attributes_Args full = {};
  if (Status status = TheHost().Call(full); !status.ok()) return status;
  args.attributes = full.attributes;
  args.num_attributes = full.num_attributes;
  return {};
}

struct ReadyCallback {
  PJRT_EventCallback callback;
  void* user_arg;
};

void OnHostReady(PJRT_Error* error, void* user_arg) {
  const std::unique_ptr<ReadyCallback> callback(static_cast<ReadyCallback*>(user_arg));
  callback->callback(NewError(TheHost().TakeError(error)), callback->user_arg);
}

Status EventOnReady(PJRT_Event_OnReady_Args& args) {
  auto callback = std::make_unique<ReadyCallback>(ReadyCallback{args.callback, args.user_arg});
  PJRT_Event_OnReady_Args ours = {};
  ours.event = args.event;
  ours.callback = OnHostReady;
  ours.user_arg = callback.get();
  if (Status status = TheHost().Call(ours); !status.ok()) return status;
  callback.release();  // OnHostReady has it now
  return {};
}

// -- Device ---------------------------------------------------------------------------

// JAX prints a device by these, and the host's, on Linux a CPU, would look like JAX's own.
Result<int32_t> DeviceId(PJRT_DeviceDescription* description) {
  PJRT_DeviceDescription_Id_Args args = {};
  args.device_description = description;
  if (Status status = TheHost().Call(args); !status.ok()) return status;
  return args.id;
}

// Lives as long as the process, as the API wants of names: there is one device, or few.
const std::string& Keep(std::string name) {
  static std::mutex mutex;  // guards the set
  static auto& names = *new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return *names.insert(std::move(name)).first;
}

Status DeviceDebugString(PJRT_DeviceDescription_DebugString_Args& args) {
  Result<int32_t> id = DeviceId(args.device_description);
  if (!id.ok()) return id.status();
  const std::string& name = Keep(ThePlugin()->settings.platform_name + ":" + std::to_string(*id));
  args.debug_string = name.data();
  args.debug_string_size = name.size();
  return {};
}

Status DeviceToString(PJRT_DeviceDescription_ToString_Args& args) {
  Result<int32_t> id = DeviceId(args.device_description);
  if (!id.ok()) return id.status();
  const std::string& name = Keep("FlashMetalDevice(id=" + std::to_string(*id) + ")");
  args.to_string = name.data();
  args.to_string_size = name.size();
  return {};
}

// -- Client ---------------------------------------------------------------------------

Status ClientCreate(PJRT_Client_Create_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  if (Status status = AskHost(args); !status.ok()) return status;
  const Status added = AddClient(args.client);
  if (added.ok() || args.client == nullptr) return added;
  PJRT_Client_Destroy_Args destroy = {};
  destroy.client = args.client;
  (void)TheHost().Call(destroy);  // the first error is the one to report
  return added;
}

Status ClientDestroy(PJRT_Client_Destroy_Args& args) {
  // The threads that this would wait for, ours and the host's, are not there.
  if (!CheckNotForked().ok()) return {};
  WaitUntilIdle();
  RemoveClient(args.client);
  return AskHost(args);
}

Status ClientPlatformName(PJRT_Client_PlatformName_Args& args) {
  const std::string& name = ThePlugin()->settings.platform_name;
  args.platform_name = name.data();
  args.platform_name_size = name.size();
  return {};
}

Status TopologyPlatformName(PJRT_TopologyDescription_PlatformName_Args& args) {
  const std::string& name = ThePlugin()->settings.platform_name;
  args.platform_name = name.data();
  args.platform_name_size = name.size();
  return {};
}

Status BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  if (Status status = AskHost(args); !status.ok()) return status;
  return args.buffer == nullptr ? WrongAnswer(args.kSlot, "gave no buffer") : Status();
}

Status Compile(PJRT_Client* client, const std::string& program, const std::string& options,
               PJRT_LoadedExecutable** executable) {
  const std::shared_ptr<const ClientState> state = FindClient(client);
  if (state == nullptr) return InvalidArgument("the client is not one of this plugin.");
  Result<PJRT_LoadedExecutable*> compiled = CompileProgram(*state, program, options);
  if (!compiled.ok()) return compiled.status();
  *executable = *compiled;
  return {};
}

Status ClientCompile(PJRT_Client_Compile_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  const PJRT_Program& program = *args.program;
  // A program in another format (HLO) has no calls that we could find: the host's.
  if (std::string(program.format, program.format_size) != "mlir") return AskHost(args);
  return Compile(args.client, {program.code, program.code_size},
                 {args.compile_options, args.compile_options_size}, &args.executable);
}

// -- Executables ----------------------------------------------------------------------

Status LoadedExecutableDestroy(PJRT_LoadedExecutable_Destroy_Args& args) {
  Forget(args.executable);
  return AskHost(args);
}

Status ExecutableDestroy(PJRT_Executable_Destroy_Args& args) {
  Forget(args.executable);
  return AskHost(args);
}

Status LoadedExecutableGetExecutable(PJRT_LoadedExecutable_GetExecutable_Args& args) {
  if (Status status = AskHost(args); !status.ok()) return status;
  NoteUnloaded(args.loaded_executable, args.executable);
  return {};
}

// What the host loads from the shadow of a plan would be the shadow again.
Status ClientLoad(PJRT_Client_Load_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  const std::shared_ptr<const Program> program = FindProgram(args.executable);
  if (program != nullptr && program->device().client != args.client) {
    return Unimplemented(
        "a program with custom calls can be loaded only by the client that compiled it; serialize "
        "it, or compile it again.");
  }
  if (Status status = AskHost(args); !status.ok()) return status;
  if (program != nullptr) NoteLoaded(args.loaded_executable, program);
  return {};
}

// See HostAccess. An argument may be a view wherever it comes from.
bool HostMayOverwrite() {
  const std::shared_ptr<const ClientState> client = AnyClient();
  return client == nullptr || client->access.host_may_overwrite;
}

Status LoadedExecutableExecute(PJRT_LoadedExecutable_Execute_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  const LoadedExecutable loaded = FindLoaded(args.executable);
  if (loaded.program != nullptr) {
    PJRT_LoadedExecutable_IsDeleted_Args deleted = {};
    deleted.executable = args.executable;
    if (Status status = TheHost().Call(deleted); !status.ok()) return status;
    if (deleted.is_deleted) return InvalidArgument("the executable has been deleted.");
    return ExecuteProgram(loaded.program, args);
  }
  for (size_t i = 0; i < args.num_devices; ++i) {
    Status status =
        PrepareForHost(args.argument_lists[i], args.num_args, loaded.may_overwrite_arguments);
    if (!status.ok()) return status;
  }
  // The options are a struct of the caller's size too.
  if (!PaddedStruct::Fits(args.options)) return AskHost(args);
  PaddedStruct options(args.options);
  PJRT_ExecuteOptions* const original = args.options;
  args.options = reinterpret_cast<PJRT_ExecuteOptions*>(options.bytes);
  std::vector<int64_t> all;
  if (loaded.may_overwrite_arguments && !HostMayOverwrite()) {
    all.resize(args.num_args);
    std::iota(all.begin(), all.end(), 0);
    args.options->non_donatable_input_indices = all.data();
    args.options->num_non_donatable_input_indices = all.size();
  }
  const Status status = AskHost(args);
  args.options = original;
  return status;
}

Status ExecutableSerialize(PJRT_Executable_Serialize_Args& args) {
  const std::shared_ptr<const Program> program = FindProgram(args.executable);
  if (program == nullptr) return AskHost(args);
  auto* bytes = new std::string(SerializeProgram(*program));
  args.serialized_bytes = bytes->data();
  args.serialized_bytes_size = bytes->size();
  args.serialized_executable = reinterpret_cast<PJRT_SerializedExecutable*>(bytes);
  args.serialized_executable_deleter = [](PJRT_SerializedExecutable* serialized) {
    delete reinterpret_cast<std::string*>(serialized);
  };
  return {};
}

Status ExecutableDeserializeAndLoad(PJRT_Executable_DeserializeAndLoad_Args& args) {
  if (Status status = CheckNotForked(); !status.ok()) return status;
  bool is_ours = false;
  Result<SerializedProgram> serialized = DeserializeProgram(
      {args.serialized_executable, args.serialized_executable_size}, &is_ours);
  if (!is_ours) return AskHost(args);
  if (!serialized.ok()) return serialized.status();
  std::string options = std::move(serialized->options);
  const bool has_options =
      args.struct_size >= offsetof(PJRT_Executable_DeserializeAndLoad_Args,
                                   overridden_serialized_compile_options_size) +
                              sizeof(size_t);
  if (has_options && args.overridden_serialized_compile_options_size > 0) {
    options.assign(args.overridden_serialized_compile_options,
                   args.overridden_serialized_compile_options_size);
  }
  return Compile(args.client, serialized->program, options, &args.loaded_executable);
}

// With null for the code, says how large it is; else copies it there.
Status ExecutableOptimizedProgram(PJRT_Executable_OptimizedProgram_Args& args) {
  const std::shared_ptr<const std::string> code_to_show = CodeInsteadOfOptimized(args.executable);
  if (code_to_show == nullptr) {
    if ((ThePlugin()->settings.flags & JFM_HIDE_OPTIMIZED_PROGRAM) != 0) {
      return Unimplemented("this version of jaxlib cannot read the host's optimised programs.");
    }
    return AskHost(args);
  }
  const std::string& code = *code_to_show;
  PJRT_Program& out = *args.program;
  out.format = "mlir";
  out.format_size = 4;
  if (out.code == nullptr) {
    out.code_size = code.size();
    return {};
  }
  if (out.code_size < code.size()) {
    return InvalidArgument("the buffer for the program is too small.");
  }
  std::memcpy(out.code, code.data(), code.size());
  return {};
}

template <class Args>
Status Fingerprint(Args& args, const std::shared_ptr<const Program>& program) {
  if (program == nullptr) return AskHost(args);
  const std::string& fingerprint = program->plan().fingerprint;
  args.executable_fingerprint = fingerprint.data();
  args.executable_fingerprint_size = fingerprint.size();
  return {};
}

Status ExecutableFingerprint(PJRT_Executable_Fingerprint_Args& args) {
  return Fingerprint(args, FindProgram(args.executable));
}

Status LoadedExecutableFingerprint(PJRT_LoadedExecutable_Fingerprint_Args& args) {
  return Fingerprint(args, FindLoaded(args.executable).program);
}

Status ExecutableSizeOfGeneratedCode(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args& args) {
  const std::shared_ptr<const Program> program = FindProgram(args.executable);
  if (program == nullptr) return AskHost(args);
  args.size_in_bytes = program->code_bytes();
  return {};
}

// Arguments, results and aliases are the shadow's; what the program needs in between is not.
Status ExecutableMemoryStats(PJRT_Executable_GetCompiledMemoryStats_Args& args) {
  if (Status status = AskHost(args); !status.ok()) return status;
  const std::shared_ptr<const Program> program = FindProgram(args.executable);
  if (program == nullptr) return {};
  args.generated_code_size_in_bytes = program->code_bytes();
  args.temp_size_in_bytes = program->temporary_bytes();
  if (args.struct_size >=
      offsetof(PJRT_Executable_GetCompiledMemoryStats_Args, peak_memory_in_bytes) +
          sizeof(int64_t)) {
    args.peak_memory_in_bytes = args.argument_size_in_bytes + args.output_size_in_bytes -
                                args.alias_size_in_bytes + args.temp_size_in_bytes;
  }
  return {};
}

// The properties live as long as the executable by the API's rules: kept with the table.
Status ExecutableCostAnalysis(PJRT_Executable_GetCostAnalysis_Args& args) {
  const std::shared_ptr<const Program> program = FindProgram(args.executable);
  if (program == nullptr) return AskHost(args);
  const std::vector<PJRT_NamedValue>* properties = nullptr;
  if (Status status = program->NamedCosts(&properties); !status.ok()) return status;
  args.properties = properties->data();
  args.num_properties = properties->size();
  return {};
}

Status ExecuteContextDestroy(PJRT_ExecuteContext_Destroy_Args& args) {
  ForgetUserData(args.context);
  return AskHost(args);
}

// -- Buffers --------------------------------------------------------------------------

Status BufferDestroy(PJRT_Buffer_Destroy_Args& args) {
  return DestroyLater(args.buffer) ? Status() : AskHost(args);
}

Status BufferDelete(PJRT_Buffer_Delete_Args& args) {
  return DeleteLater(args.buffer) ? Status() : AskHost(args);
}

Status BufferIsDeleted(PJRT_Buffer_IsDeleted_Args& args) {
  if (!IsGivenAway(args.buffer)) return AskHost(args);
  args.is_deleted = true;
  return {};
}

// Functions for which a buffer must exist.
template <class Args>
Status WithBuffer(Args& args) {
  constexpr bool kMayOverwrite = Args::kSlot == Slot::kBuffer_DonateWithControlDependency;
  if (Status status = PrepareForHost(&args.buffer, 1, kMayOverwrite); !status.ok()) return status;
  return AskHost(args);
}

// Functions that want the memory of a buffer: hosts abort where it is an error instead.
template <class Args>
Status WithMemory(Args& args) {
  if (Status status = PrepareForHost(&args.buffer, 1, false); !status.ok()) return status;
  HostBuffer buffer(TheHost(), args.buffer, HostBuffer::Owner::kCaller);
  if (Status status = buffer.Await(); !status.ok()) return status;
  return AskHost(args);
}

// -- The table ------------------------------------------------------------------------

// Shapes of functions to the one that a slot has.
template <class Args, Status (*function)(Args&)>
PJRT_Error* Entry(void* args) {
  const Status status =
      WithoutExceptions([args] { return function(*static_cast<Args*>(args)); });
  return NewError(status);
}

template <class Args, void (*function)(Args&)>
PJRT_Error* Entry(void* args) {
  function(*static_cast<Args*>(args));
  return nullptr;  // nobody looks: the slot returns nothing
}

#define JFM_ENTRY(function, Args) {Args::kSlot, Entry<Args, function>}
constexpr SlotFunction kOurFunctions[] = {
    JFM_ENTRY(ErrorDestroy, PJRT_Error_Destroy_Args),
    JFM_ENTRY(ErrorGetMessage, PJRT_Error_Message_Args),
    JFM_ENTRY(ErrorGetCode, PJRT_Error_GetCode_Args),
    JFM_ENTRY(ErrorForEachPayload, PJRT_Error_ForEachPayload_Args),
    JFM_ENTRY(PluginInitialize, PJRT_Plugin_Initialize_Args),
    JFM_ENTRY(PluginAttributes, PJRT_Plugin_Attributes_Args),
    JFM_ENTRY(EventOnReady, PJRT_Event_OnReady_Args),
    JFM_ENTRY(DeviceDebugString, PJRT_DeviceDescription_DebugString_Args),
    JFM_ENTRY(DeviceToString, PJRT_DeviceDescription_ToString_Args),
    JFM_ENTRY(ClientCreate, PJRT_Client_Create_Args),
    JFM_ENTRY(ClientDestroy, PJRT_Client_Destroy_Args),
    JFM_ENTRY(ClientPlatformName, PJRT_Client_PlatformName_Args),
    JFM_ENTRY(TopologyPlatformName, PJRT_TopologyDescription_PlatformName_Args),
    JFM_ENTRY(BufferFromHostBuffer, PJRT_Client_BufferFromHostBuffer_Args),
    JFM_ENTRY(ClientCompile, PJRT_Client_Compile_Args),
    JFM_ENTRY(LoadedExecutableDestroy, PJRT_LoadedExecutable_Destroy_Args),
    JFM_ENTRY(ExecutableDestroy, PJRT_Executable_Destroy_Args),
    JFM_ENTRY(LoadedExecutableGetExecutable, PJRT_LoadedExecutable_GetExecutable_Args),
    JFM_ENTRY(ClientLoad, PJRT_Client_Load_Args),
    JFM_ENTRY(LoadedExecutableExecute, PJRT_LoadedExecutable_Execute_Args),
    JFM_ENTRY(ExecutableSerialize, PJRT_Executable_Serialize_Args),
    JFM_ENTRY(ExecutableDeserializeAndLoad, PJRT_Executable_DeserializeAndLoad_Args),
    JFM_ENTRY(ExecutableOptimizedProgram, PJRT_Executable_OptimizedProgram_Args),
    JFM_ENTRY(ExecutableFingerprint, PJRT_Executable_Fingerprint_Args),
    JFM_ENTRY(LoadedExecutableFingerprint, PJRT_LoadedExecutable_Fingerprint_Args),
    JFM_ENTRY(ExecutableSizeOfGeneratedCode, PJRT_Executable_SizeOfGeneratedCodeInBytes_Args),
    JFM_ENTRY(ExecutableMemoryStats, PJRT_Executable_GetCompiledMemoryStats_Args),
    JFM_ENTRY(ExecutableCostAnalysis, PJRT_Executable_GetCostAnalysis_Args),
    JFM_ENTRY(ExecuteContextDestroy, PJRT_ExecuteContext_Destroy_Args),
    JFM_ENTRY(BufferDestroy, PJRT_Buffer_Destroy_Args),
    JFM_ENTRY(BufferDelete, PJRT_Buffer_Delete_Args),
    JFM_ENTRY(BufferIsDeleted, PJRT_Buffer_IsDeleted_Args),
    JFM_ENTRY(WithBuffer, PJRT_Buffer_DonateWithControlDependency_Args),
    JFM_ENTRY(WithBuffer, PJRT_Buffer_CopyToDevice_Args),
    JFM_ENTRY(WithBuffer, PJRT_Buffer_CopyToMemory_Args),
    JFM_ENTRY(WithBuffer, PJRT_Buffer_Bitcast_Args),
    JFM_ENTRY(WithMemory, PJRT_Buffer_UnsafePointer_Args),
    JFM_ENTRY(WithMemory, PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args),
    JFM_ENTRY(WithMemory, PJRT_Buffer_IncreaseExternalReferenceCount_Args),
    JFM_ENTRY(WithMemory, PJRT_Buffer_CopyRawToHost_Args),
    JFM_ENTRY(WithMemory, PJRT_Buffer_CopyRawToHostFuture_Args),
};
#undef JFM_ENTRY

template <size_t index>
PJRT_Error* Forward(void* args) {
  PJRT_Error* error = TheHost().Forward(static_cast<Slot>(index), args);
  return error == nullptr ? nullptr : NewError(TheHost().TakeError(error));
}

template <size_t... indices>
constexpr std::array<PJRT_Function, kNumSlots> Forwarders(std::index_sequence<indices...>) {
  return {Forward<indices>...};
}
constexpr std::array<PJRT_Function, kNumSlots> kForwarders =
    Forwarders(std::make_index_sequence<kNumSlots>());

// The host's chain of extensions without those that we replace or that would go around us:
// copies, because the links are in the nodes.
PJRT_Extension* CopyExtensions(const PJRT_Extension* node, const PJRT_Extension** host_ffi) {
  if (node == nullptr) return nullptr;
  PJRT_Extension* rest = CopyExtensions(node->next, host_ffi);
  if (node->type == PJRT_ExtensionType_FFI) *host_ffi = node;
  if (node->type == PJRT_ExtensionType_FFI || node->type == PJRT_ExtensionType_PhaseCompile ||
      node->type == PJRT_ExtensionType_GpuCustomCall) {
    return rest;
  }
  auto* copy = static_cast<PJRT_Extension*>(::operator new(node->struct_size));
  std::memcpy(static_cast<void*>(copy), node, node->struct_size);
  copy->next = rest;
  return copy;
}

PJRT_Api MakeApi() {
  const Plugin& plugin = *ThePlugin();
  const Host& host = *plugin.host;
  PJRT_Api api = {};
  // jaxlib calls the first ones without looking whether they are there (jax-metal's table
  // ends before GetCompiledMemoryStats): the host's absence is then an error.
  size_t num_slots = std::max(host.num_slots(), kNumStableSlots);
  for (size_t i = 0; i < num_slots; ++i) {
    if (host.Has(static_cast<Slot>(i))) api.slots[i] = kForwarders[i];
  }
  for (const SlotFunction& ours : kOurFunctions) {
    const size_t index = static_cast<size_t>(ours.slot);
    if (index < num_slots) api.slots[index] = ours.function;
  }
  const PJRT_Extension* host_ffi = nullptr;
  PJRT_Extension* extensions = nullptr;
  if (plugin.is_old_host()) {
    for (const SlotFunction& ours : OldHostFunctions()) {
      const size_t index = static_cast<size_t>(ours.slot);
      api.slots[index] = ours.function;
      num_slots = std::max(num_slots, index + 1);
    }
  } else {
    extensions = CopyExtensions(host.extensions(), &host_ffi);
  }
  api.struct_size = kApiHeaderSize + num_slots * sizeof(PJRT_Function);
  api.version.struct_size = sizeof(api.version);
  api.version.minor = std::min(host.minor(), kKnownMinor);
  api.extensions =
      MakeFfiExtension(plugin.settings.platform_name, host_ffi, WithProfiler(extensions), NewError);
  return api;
}

// -- Before there is a host -------------------------------------------------------------

PJRT_Error* NotConfigured(void*) {
  return NewError({Code::kFailedPrecondition,
                   "jax_flash_metal's plugin has no host yet: JAX loads it through the package's "
                   "entry point (jax_flash_metal.pjrt), not by the path of its library."});
}

// Enough of a table for a caller to be told so.
PJRT_Api MakeUnconfiguredApi() {
  PJRT_Api api = {};
  std::fill(std::begin(api.slots), std::end(api.slots), NotConfigured);
  constexpr size_t kNumErrorFunctions = 4;
  for (size_t i = 0; i < kNumErrorFunctions; ++i) {
    api.slots[static_cast<size_t>(kOurFunctions[i].slot)] = kOurFunctions[i].function;
  }
  api.struct_size = sizeof(api);
  api.version.struct_size = sizeof(api.version);
  api.version.minor = kKnownMinor;
  return api;
}

}  // namespace
}  // namespace jfm::pjrt

extern "C" JFM_EXPORT const jfm::pjrt::PJRT_Api* GetPjrtApi() {
  using namespace jfm::pjrt;
  if (ThePlugin() == nullptr) {
    static const PJRT_Api unconfigured = MakeUnconfiguredApi();
    return &unconfigured;
  }
  static const PJRT_Api api = MakeApi();
  return &api;
}
