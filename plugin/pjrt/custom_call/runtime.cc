#include "plugin/pjrt/custom_call/runtime.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/custom_call/exception_barrier.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "plugin/pjrt/custom_call/task_pool.h"

namespace jfm::pjrt {

// -- Objects ------------------------------------------------------------------------

Status State::Set(int64_t type_id, void* object, void (*deleter)(void*)) {
  if (object == nullptr) return InvalidArgument("the state must not be a null pointer");
  if (deleter == nullptr) return InvalidArgument("the state's type must have a deleter");
  if (object_ != nullptr) {
    return {Code::kFailedPrecondition,
            "the state is set already, with type id " + std::to_string(type_id_)};
  }
  type_id_ = type_id;
  object_ = object;
  deleter_ = deleter;
  return {};
}

Result<void*> State::Get(int64_t type_id) const {
  if (object_ == nullptr) return Status(Code::kNotFound, "the state is not set");
  if (type_id_ != type_id) {
    return InvalidArgument("the state has type id " + std::to_string(type_id_) + ", but type id " +
                           std::to_string(type_id) + " was asked for");
  }
  return object_;
}

ScratchMemory::~ScratchMemory() {
  for (void* block : blocks_) std::free(block);
}

Result<void*> ScratchMemory::Allocate(size_t size, size_t alignment) {
  // What vector code likes and hosts' buffers have.
  constexpr size_t kAlignment = 64;
  constexpr size_t kMaxAlignment = 4096;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > kMaxAlignment) {
    return InvalidArgument("the alignment of scratch memory must be a power of two up to " +
                           std::to_string(kMaxAlignment) + ", but got " +
                           std::to_string(alignment));
  }
  void* block = nullptr;
  // At least a byte: an empty allocation has an address of its own as well.
  if (posix_memalign(&block, std::max(alignment, kAlignment), std::max<size_t>(size, 1)) != 0) {
    return Status(Code::kResourceExhausted,
                  "out of host memory: " + std::to_string(size) + " bytes of scratch memory");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.push_back(block);
  return block;
}

Status ScratchMemory::Free(void* data) {
  if (data == nullptr) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(blocks_.begin(), blocks_.end(), data);
  if (found == blocks_.end()) {
    return InvalidArgument("this call did not allocate the scratch memory that it frees");
  }
  *found = blocks_.back();
  blocks_.pop_back();
  std::free(data);
  return {};
}

Status Completion::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  return status_;
}

bool Completion::Set(Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (done_) return false;
  status_ = std::move(status);
  done_ = true;
  changed_.notify_all();
  return true;
}

const char* StageName(int32_t stage) {
  switch (stage) {
    case XLA_FFI_INSTANTIATE:
      return "instantiate";
    case XLA_FFI_PREPARE:
      return "prepare";
    case XLA_FFI_INITIALIZE:
      return "initialize";
    case XLA_FFI_EXECUTE:
      return "execute";
  }
  return "unknown";
}

// -- The functions of the table -----------------------------------------------------

namespace {

Status CheckSize(const XLA_FFI_ArgsHeader* args, size_t expected) {
  if (args->struct_size >= expected) return {};
  return InvalidArgument("the arguments of an FFI function have " +
                         std::to_string(args->struct_size) + " bytes, but " +
                         std::to_string(expected) + " were expected: the handler was compiled " +
                         "with headers of an FFI version that is not known here");
}

XLA_FFI_Error* NewError() {
  XLA_FFI_Error* error = new (std::nothrow) XLA_FFI_Error;
  // To return null would turn a failure into a success.
  if (error == nullptr) std::abort();
  return error;
}

// The function for the table: checks the size of the arguments, which XLA counts up to
// the last member; no exceptions; an error object.
template <class Args, Status (*function)(Args*), size_t size>
XLA_FFI_Error* Entry(Args* args) noexcept {
  Status status = WithoutExceptions([&]() -> Status {
    const auto* header = reinterpret_cast<const XLA_FFI_ArgsHeader*>(args);
    if (Status wrong = CheckSize(header, size); !wrong.ok()) return wrong;
    return function(args);
  });
  if (status.ok()) return nullptr;
  XLA_FFI_Error* error = NewError();
  error->status = std::move(status);
  return error;
}

Code ErrorCode(int32_t code) {
  const auto last = static_cast<int32_t>(Code::kUnauthenticated);
  return code < 0 || code > last ? Code::kUnknown : static_cast<Code>(code);
}

XLA_FFI_Error* ErrorCreate(XLA_FFI_ErrorCreateArgs* args) noexcept {
  XLA_FFI_Error* error = NewError();
  error->status = WithoutExceptions([&]() -> Status {
    const char* message = args->message != nullptr ? args->message : "";
    if (args->code == 0) return {Code::kUnknown, std::string("error with code OK: ") + message};
    return {ErrorCode(args->code), message};
  });
  return error;
}

void ErrorGetMessage(XLA_FFI_ErrorArgs* args) noexcept {
  args->message = args->error->status.message().c_str();
  if (args->header.struct_size >= XLA_FFI_SIZE(XLA_FFI_ErrorArgs, code)) {
    args->code = static_cast<int32_t>(args->error->status.code());
  }
}

void ErrorDestroy(XLA_FFI_ErrorArgs* args) noexcept { delete args->error; }

std::string ToString(const XLA_FFI_ByteSpan& span) { return std::string(span.data, span.size); }

Status HandlerRegister(XLA_FFI_HandlerRegisterArgs* args) {
  HandlerStages stages;
  stages.instantiate = args->bundle.instantiate;
  stages.prepare = args->bundle.prepare;
  stages.initialize = args->bundle.initialize;
  stages.execute = args->bundle.execute;
  const bool has_record =
      args->header.struct_size >= XLA_FFI_SIZE(XLA_FFI_HandlerRegisterArgs5, traits);
  stages.traits =
      has_record ? reinterpret_cast<XLA_FFI_HandlerRegisterArgs5*>(args)->traits : args->traits;
  return RegisterHandlerOfPlatform(ToString(args->name), ToString(args->platform), stages);
}

Status StreamGet(XLA_FFI_StreamGetArgs*) {
  return Unimplemented("there is no stream: custom calls run on the host's memory");
}

Status TypeRegister1(XLA_FFI_TypeRegisterArgs* args) {
  return RegisterType(ToString(args->name), args->type_id, nullptr);
}

Status TypeRegister2(XLA_FFI_TypeRegisterArgs* args) {
  const XLA_FFI_TypeInfo* info = args->type_info;
  return RegisterType(ToString(args->name), args->type_id,
                      info != nullptr ? info->deleter : nullptr);
}

Status ContextGet(XLA_FFI_ContextGetArgs* args) {
  const UserData* user_data = args->context->execution.user_data;
  args->data = user_data != nullptr ? user_data->Find(*args->type_id) : nullptr;
  if (args->data != nullptr) return {};
  return {Code::kNotFound,
          "the execution has no user data of type id " + std::to_string(*args->type_id)};
}

Status SetState(XLA_FFI_ExecutionContext* context, int32_t stage, int64_t type_id, void* state,
                void (*deleter)(void*)) {
  if (stage != context->stage || stage < 0 || stage >= kNumStateStages) {
    return {Code::kFailedPrecondition, std::string("the state of the ") + StageName(stage) +
                                           " stage cannot be set at the " +
                                           StageName(context->stage) + " stage"};
  }
  return context->states[stage]->Set(type_id, state, deleter);
}

Status StateSet1(XLA_FFI_StateArgs1* args) {
  return SetState(args->context, XLA_FFI_INSTANTIATE, *args->type_id, args->state, args->deleter);
}

Result<TypeInfo> RegisteredType(int64_t type_id) {
  std::optional<TypeInfo> type = FindType(type_id);
  if (type.has_value()) return *std::move(type);
  return Status(Code::kFailedPrecondition, "no type is registered with type id " +
                                               std::to_string(type_id) +
                                               "; see jax.ffi.register_ffi_type");
}

constexpr size_t kStateSize2 = XLA_FFI_SIZE(XLA_FFI_StateArgs1, state);

Status StateSet(XLA_FFI_ArgsHeader* args) {
  XLA_FFI_StateArgs3 args3 = {};
  if (args->struct_size >= sizeof(XLA_FFI_StateArgs3)) {
    args3 = *reinterpret_cast<const XLA_FFI_StateArgs3*>(args);
  } else {  // 0.2: without a stage
    const auto& args2 = *reinterpret_cast<const XLA_FFI_StateArgs1*>(args);
    args3.context = args2.context;
    args3.stage = XLA_FFI_INSTANTIATE;
    args3.type_id = args2.type_id;
    args3.state = args2.state;
  }
  const Result<TypeInfo> type = RegisteredType(*args3.type_id);
  if (!type.ok()) return type.status();
  return SetState(args3.context, args3.stage, *args3.type_id, args3.state, type->deleter);
}

Status StateGet(XLA_FFI_ArgsHeader* args) {
  const bool has_stage = args->struct_size >= sizeof(XLA_FFI_StateArgs3);
  auto* args1 = reinterpret_cast<XLA_FFI_StateArgs1*>(args);
  auto* args3 = reinterpret_cast<XLA_FFI_StateArgs3*>(args);
  const int32_t stage = has_stage ? args3->stage : static_cast<int32_t>(XLA_FFI_INSTANTIATE);
  const State* state = nullptr;
  if (stage >= 0 && stage < kNumStateStages) state = args1->context->states[stage];
  if (state == nullptr) {
    return {Code::kFailedPrecondition, std::string("there is no state of the ") + StageName(stage) +
                                           " stage at the " + StageName(args1->context->stage) +
                                           " stage"};
  }
  const Result<void*> object = state->Get(has_stage ? *args3->type_id : *args1->type_id);
  if (!object.ok()) return object.status();
  (has_stage ? args3->state : args1->state) = *object;
  return {};
}

Status CheckMemory(const XLA_FFI_ExecutionContext& context) {
  if (context.memory != nullptr) return {};
  return {Code::kFailedPrecondition,
          std::string("there is no scratch memory at the ") + StageName(context.stage) + " stage"};
}

Status DeviceMemoryAllocate(XLA_FFI_AllocateArgs* args) {
  if (Status status = CheckMemory(*args->context); !status.ok()) return status;
  const Result<void*> data = args->context->memory->Allocate(args->size, args->alignment);
  if (!data.ok()) return data.status();
  args->data = *data;
  return {};
}

Status DeviceMemoryFree(XLA_FFI_FreeArgs* args) {
  if (Status status = CheckMemory(*args->context); !status.ok()) return status;
  return args->context->memory->Free(args->data);
}

Status ThreadPoolSchedule(XLA_FFI_ScheduleArgs* args) {
  ScheduleTask(args->task, args->data);
  return {};
}

Status ThreadPoolNumThreads(XLA_FFI_NumThreadsArgs* args) {
  *args->num_threads = NumTaskThreads();
  return {};
}

Status FutureCreate(XLA_FFI_FutureArgs* args) {
  args->future = new XLA_FFI_Future{std::make_shared<Completion>()};
  return {};
}

Status SetFuture(XLA_FFI_FutureArgs* args, Status status) {
  // A reference of our own: the one who waits deletes the future as soon as it is set.
  const std::shared_ptr<Completion> completion = args->future->completion;
  if (completion->Set(std::move(status))) return {};
  return {Code::kFailedPrecondition, "the future is set already"};
}

Status FutureSetAvailable(XLA_FFI_FutureArgs* args) { return SetFuture(args, {}); }

Status FutureSetError(XLA_FFI_FutureArgs* args) {
  const std::unique_ptr<XLA_FFI_Error> error(args->error);
  if (error == nullptr) return InvalidArgument("a future's error must not be a null pointer");
  return SetFuture(args, error->status);
}

Status RunIdGet(XLA_FFI_RunIdArgs* args) {
  args->run_id = args->context->execution.run_id;
  return {};
}

Status DeviceOrdinalGet(XLA_FFI_DeviceOrdinalArgs* args) {
  args->device_ordinal = args->context->execution.device_ordinal;
  return {};
}

Status ContextFindExtension(XLA_FFI_FindExtensionArgs* args) {
  args->extension = nullptr;  // no extension is known: not an error
  return {};
}

Status CustomOptionsGet(XLA_FFI_CustomOptionsArgs* args) {
  static const XLA_FFI_Attributes none = {
      sizeof(XLA_FFI_Attributes), nullptr, 0, nullptr, nullptr, nullptr};
  args->options = &none;
  return {};
}

// -- Slots that changed their meaning -----------------------------------------------

// Futures take different numbers of members, and thread counts take one more still, so
// that the size says which function the caller of a shared slot means.
constexpr size_t kFutureCreateSize = XLA_FFI_SIZE(XLA_FFI_ArgsHeader, extensions);
constexpr size_t kSetAvailableSize = XLA_FFI_SIZE(XLA_FFI_FutureArgs, future);

// Future_Create in the first 0.1.
Status NumThreadsOrFutureCreate(XLA_FFI_ArgsHeader* args) {
  if (args->struct_size == kFutureCreateSize) {
    return FutureCreate(reinterpret_cast<XLA_FFI_FutureArgs*>(args));
  }
  return ThreadPoolNumThreads(reinterpret_cast<XLA_FFI_NumThreadsArgs*>(args));
}

// Future_SetAvailable in the first 0.1.
Status FutureCreateOrSetAvailable(XLA_FFI_ArgsHeader* args) {
  auto* future_args = reinterpret_cast<XLA_FFI_FutureArgs*>(args);
  if (args->struct_size == kSetAvailableSize) return FutureSetAvailable(future_args);
  return FutureCreate(future_args);
}

// Future_SetError in the first 0.1.
Status FutureSetAvailableOrSetError(XLA_FFI_ArgsHeader* args) {
  auto* future_args = reinterpret_cast<XLA_FFI_FutureArgs*>(args);
  if (args->struct_size >= sizeof(XLA_FFI_FutureArgs)) return FutureSetError(future_args);
  return FutureSetAvailable(future_args);
}

// -- Tables -------------------------------------------------------------------------

int NumSlots(int32_t minor) {
  // 0.4 is known from its handlers only: they use nothing that 0.3 has not.
  return minor >= 5 ? XLA_FFI_NUM_SLOTS : XLA_FFI_DEVICE_ORDINAL_GET + 1;
}

template <class Args, Status (*function)(Args*), size_t size = sizeof(Args)>
XLA_FFI_Function Slot() {
  return reinterpret_cast<XLA_FFI_Function>(&Entry<Args, function, size>);
}

XLA_FFI_ApiTable MakeTable(int32_t minor) {
  XLA_FFI_ApiTable table = {};
  table.struct_size =
      offsetof(XLA_FFI_ApiTable, slots) + NumSlots(minor) * sizeof(XLA_FFI_Function);
  table.api_version = {XLA_FFI_SIZE(XLA_FFI_Version, minor), nullptr, kXlaFfiApiMajor, minor};
  constexpr size_t kRegisterSize = XLA_FFI_SIZE(XLA_FFI_HandlerRegisterArgs, traits);
  constexpr size_t kTypeSize = XLA_FFI_SIZE(XLA_FFI_TypeRegisterArgs, type_id);
  constexpr size_t kOrdinalSize = XLA_FFI_SIZE(XLA_FFI_DeviceOrdinalArgs, device_ordinal);
  constexpr size_t kSetErrorSize = sizeof(XLA_FFI_FutureArgs);
  XLA_FFI_Function* slots = table.slots;
  slots[XLA_FFI_ERROR_CREATE] = reinterpret_cast<XLA_FFI_Function>(&ErrorCreate);
  slots[XLA_FFI_ERROR_GET_MESSAGE] = reinterpret_cast<XLA_FFI_Function>(&ErrorGetMessage);
  slots[XLA_FFI_ERROR_DESTROY] = reinterpret_cast<XLA_FFI_Function>(&ErrorDestroy);
  slots[XLA_FFI_HANDLER_REGISTER] =
      Slot<XLA_FFI_HandlerRegisterArgs, HandlerRegister, kRegisterSize>();
  slots[XLA_FFI_STREAM_GET] = Slot<XLA_FFI_StreamGetArgs, StreamGet>();
  slots[XLA_FFI_TYPE_REGISTER] = Slot<XLA_FFI_TypeRegisterArgs, TypeRegister2, kTypeSize>();
  slots[XLA_FFI_CONTEXT_GET] = Slot<XLA_FFI_ContextGetArgs, ContextGet>();
  slots[XLA_FFI_STATE_SET] = Slot<XLA_FFI_ArgsHeader, StateSet, kStateSize2>();
  slots[XLA_FFI_STATE_GET] = Slot<XLA_FFI_ArgsHeader, StateGet, kStateSize2>();
  slots[XLA_FFI_DEVICE_MEMORY_ALLOCATE] = Slot<XLA_FFI_AllocateArgs, DeviceMemoryAllocate>();
  slots[XLA_FFI_DEVICE_MEMORY_FREE] = Slot<XLA_FFI_FreeArgs, DeviceMemoryFree>();
  slots[XLA_FFI_THREAD_POOL_SCHEDULE] = Slot<XLA_FFI_ScheduleArgs, ThreadPoolSchedule>();
  slots[XLA_FFI_THREAD_POOL_NUM_THREADS] = Slot<XLA_FFI_NumThreadsArgs, ThreadPoolNumThreads>();
  slots[XLA_FFI_FUTURE_CREATE] = Slot<XLA_FFI_FutureArgs, FutureCreate, kFutureCreateSize>();
  slots[XLA_FFI_FUTURE_SET_AVAILABLE] =
      Slot<XLA_FFI_FutureArgs, FutureSetAvailable, kSetAvailableSize>();
  slots[XLA_FFI_FUTURE_SET_ERROR] = Slot<XLA_FFI_FutureArgs, FutureSetError, kSetErrorSize>();
  slots[XLA_FFI_RUN_ID_GET] = Slot<XLA_FFI_RunIdArgs, RunIdGet>();
  slots[XLA_FFI_DEVICE_ORDINAL_GET] =
      Slot<XLA_FFI_DeviceOrdinalArgs, DeviceOrdinalGet, kOrdinalSize>();
  slots[XLA_FFI_CONTEXT_FIND_EXTENSION] = Slot<XLA_FFI_FindExtensionArgs, ContextFindExtension>();
  slots[XLA_FFI_CUSTOM_OPTIONS_GET] = Slot<XLA_FFI_CustomOptionsArgs, CustomOptionsGet>();
  if (minor == 1) {
    slots[XLA_FFI_TYPE_REGISTER] = Slot<XLA_FFI_TypeRegisterArgs, TypeRegister1, kTypeSize>();
    slots[XLA_FFI_STATE_SET] = Slot<XLA_FFI_StateArgs1, StateSet1>();
    slots[XLA_FFI_THREAD_POOL_NUM_THREADS] =
        Slot<XLA_FFI_ArgsHeader, NumThreadsOrFutureCreate, kFutureCreateSize>();
    slots[XLA_FFI_FUTURE_CREATE] =
        Slot<XLA_FFI_ArgsHeader, FutureCreateOrSetAvailable, kFutureCreateSize>();
    slots[XLA_FFI_FUTURE_SET_AVAILABLE] =
        Slot<XLA_FFI_ArgsHeader, FutureSetAvailableOrSetError, kSetAvailableSize>();
  }
  return table;
}

}  // namespace

const XLA_FFI_Api* ApiForMinor(int32_t minor) {
  static const std::array<XLA_FFI_ApiTable, kXlaFfiNewestMinor + 1> tables = [] {
    std::array<XLA_FFI_ApiTable, kXlaFfiNewestMinor + 1> made = {};
    for (int32_t i = 1; i <= kXlaFfiNewestMinor; ++i) made[i] = MakeTable(i);
    return made;
  }();
  return reinterpret_cast<const XLA_FFI_Api*>(&tables[minor]);
}

// -- Calls --------------------------------------------------------------------------

Status CallHandler(void* function, XLA_FFI_CallFrameWithFuture* frame) {
  void* returned = nullptr;
  Status status = CallWithBarrier(reinterpret_cast<void* (*)(void*)>(function), frame, &returned);
  if (returned != nullptr) {
    // A handler that fails may not also promise to finish later, so its future (there is
    // none, in the handlers of XLA's own C++ API) is not waited for.
    const std::unique_ptr<XLA_FFI_Error> error(static_cast<XLA_FFI_Error*>(returned));
    status = error->status;
  } else if (status.ok() && frame->future != nullptr) {
    const std::unique_ptr<XLA_FFI_Future> future(frame->future);
    status = future->completion->Wait();
  }
  if (status.ok()) return {};
  const std::string prefix = std::string("[") + StageName(frame->frame.stage) + "] ";
  if (status.message().compare(0, prefix.size(), prefix) == 0) return status;
  return {status.code(), prefix + status.message()};
}

}  // namespace jfm::pjrt
