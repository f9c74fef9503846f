// The life of one execution, from the caller's handles to results or an error.
#include "plugin/pjrt/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/buffer_uses.h"
#include "plugin/pjrt/custom_call/ffi_extension.h"
#include "plugin/pjrt/executor.h"
#include "plugin/pjrt/work_queue.h"

namespace jfm::pjrt {
namespace {

std::atomic<int64_t> num_executions{0};

// What a plan needs of its caller, kept until it is done.
struct Execution {
  std::shared_ptr<const Program> program;
  std::vector<PJRT_Buffer*> arguments;
  std::vector<bool> expendable;  // per argument, whether its memory may be reused
  AttachedData user_data;
  int64_t run_id = 0;
};

// Which arguments the caller gives away this time.
std::vector<bool> DonatedArguments(const Program& program,
                                   const PJRT_LoadedExecutable_Execute_Args& args) {
  std::vector<bool> donated = program.donates();
  const PJRT_ExecuteOptions& options = *args.options;
  for (size_t i = 0; i < options.num_non_donatable_input_indices; ++i) {
    const size_t index = static_cast<size_t>(options.non_donatable_input_indices[i]);
    if (index < donated.size()) donated[index] = false;
  }
  return donated;
}

std::vector<BufferRef> ReferTo(const Host& host, const Execution& execution) {
  std::vector<BufferRef> references;
  references.reserve(execution.arguments.size());
  // An argument that is passed twice is one buffer, and then has two references.
  std::unordered_map<PJRT_Buffer*, BufferRef> seen;
  for (size_t i = 0; i < execution.arguments.size(); ++i) {
    BufferRef& reference = seen[execution.arguments[i]];
    if (reference == nullptr) {
      reference = std::make_shared<HostBuffer>(
          host, execution.arguments[i],
          execution.expendable[i] ? HostBuffer::Owner::kCallerDonates : HostBuffer::Owner::kCaller);
    }
    references.push_back(reference);
  }
  return references;
}

// Runs the plan. The results are owned, each by its own handle.
Result<std::vector<BufferRef>> Run(const Execution& execution) {
  const Program& program = *execution.program;
  ExecuteContext context;
  const UserData& user_data = execution.user_data.values;
  context.user_data = user_data.empty() ? nullptr : &user_data;
  context.run_id = execution.run_id;
  Result<std::vector<BufferRef>> results =
      RunProgram(program, ReferTo(*program.device().host, execution), context);
  if (!results.ok()) return results;
  for (size_t i = 0; i < results->size(); ++i) {
    BufferRef& result = (*results)[i];
    // Also held elsewhere: an argument passed through, a constant, or a result twice.
    if (result->is_owned() && result.use_count() == 1) continue;
    Result<BufferRef> copy =
        CopyBuffer(program.device(), *program.access().memory, result, program.output_types()[i]);
    if (!copy.ok()) return copy.status();
    result = std::move(*copy);
  }
  return results;
}

Status RunAndWait(const Execution& execution, std::vector<BufferRef>* results) {
  Status status = WithoutExceptions([&]() -> Status {
    Result<std::vector<BufferRef>> run = Run(execution);
    if (!run.ok()) return run.status();
    *results = std::move(*run);
    for (const BufferRef& result : *results) {
      if (Status ready = result->Await(); !ready.ok()) return ready;
    }
    return {};
  });
  ReleaseBuffers(*execution.program->device().host, execution.arguments);
  return status;
}

// -- Now --------------------------------------------------------------------------------

// An event that is ready: one of the host's, as it may know no other kind.
Result<PJRT_Event*> ReadyEvent(const Device& device, const std::vector<BufferRef>& results) {
  if (!results.empty()) {
    PJRT_Buffer_ReadyEvent_Args args = {};
    args.buffer = results[0]->handle();  // it was waited for
    if (Status status = device.host->Call(args); !status.ok()) return status;
    if (args.event == nullptr) return WrongAnswer(args.kSlot, "gave no event");
    return args.event;
  }
  // Not one of CopyToHost(), which destroys it.
  static const int32_t zero = 0;
  PJRT_Client_BufferFromHostBuffer_Args args = {};
  args.client = device.client;
  args.data = &zero;
  args.type = PJRT_BufferType_S32;
  args.host_buffer_semantics = PJRT_HostBufferSemantics_ImmutableOnlyDuringCall;
  args.device = device.device;
  if (Status status = device.host->Call(args); !status.ok()) return status;
  if (args.buffer == nullptr) return WrongAnswer(args.kSlot, "gave no buffer");
  DestroyBuffer(*device.host, args.buffer);
  if (args.done_with_host_buffer == nullptr) return WrongAnswer(args.kSlot, "gave no event");
  return args.done_with_host_buffer;
}

Status RunNow(const Execution& execution, PJRT_LoadedExecutable_Execute_Args& args) {
  std::vector<BufferRef> results;
  if (Status status = RunAndWait(execution, &results); !status.ok()) return status;
  if (args.device_complete_events != nullptr) {
    Result<PJRT_Event*> event = ReadyEvent(execution.program->device(), results);
    if (!event.ok()) return event.status();
    args.device_complete_events[0] = *event;
  }
  for (size_t i = 0; i < results.size(); ++i) args.output_lists[0][i] = results[i]->Release();
  return {};
}

// -- Later ----------------------------------------------------------------------------

bool CanRunLater(const Program& program) {
  // The layout of a promise cannot say that it is packed: the host would refuse the result.
  const std::vector<TensorType>& types = program.output_types();
  if (std::any_of(types.begin(), types.end(), IsPacked)) return false;
  const Host& host = *program.device().host;
  return program.device().memory != nullptr && host.Has(Slot::kClient_CreateAliasBuffer) &&
         host.Has(Slot::kClient_FulfillAliasBuffer) && host.Has(Slot::kEvent_Create) &&
         host.Has(Slot::kEvent_Set);
}

// A result that does not exist yet: the caller has a handle, we have its promise.
struct Promise {
  PJRT_Buffer* handle = nullptr;
  PJRT_FulfillAliasBufferCallback* fulfill = nullptr;
  PromiseId id = 0;
};

Result<Promise> NewPromise(const Device& device, const TensorType& type) {
  RowMajorLayout layout(type.dims.size());
  PJRT_Client_CreateAliasBuffer_Args args = {};
  args.client = device.client;
  args.memory = device.memory;
  args.shape_dims = type.dims.data();
  args.shape_num_dims = type.dims.size();
  args.shape_element_type = BufferTypeOf(type.dtype);
  args.shape_layout = layout.get();
  if (Status status = device.host->Call(args); !status.ok()) return status;
  if (args.alias_buffer == nullptr || args.fulfill_alias_buffer_cb == nullptr) {
    return WrongAnswer(args.kSlot, "gave no buffer");
  }
  return Promise{args.alias_buffer, args.fulfill_alias_buffer_cb, NotePromise(args.alias_buffer)};
}

// With a result, or with null and why there is none.
void Fulfill(const Device& device, const Promise& promise, PJRT_Buffer* result,
             const Status& status) {
  PJRT_Client_FulfillAliasBuffer_Args args = {};
  args.client = device.client;
  args.buffer = result;
  args.status_code = static_cast<PJRT_ErrorCode>(status.code());
  args.error_message = status.message().data();
  args.error_message_size = status.message().size();
  args.fulfill_alias_buffer_cb = promise.fulfill;
  // With an error status the host returns that very error. Otherwise it takes the result:
  // its shape and memory are those of the promise, both being the shadow's.
  (void)device.host->Call(args);
  PromiseIsKept(promise.id);
}

// An error that is a buffer: the CPU plugins write a line to stderr for every promise that
// is fulfilled with an error status.
Result<PJRT_Buffer*> NewErrorBuffer(const Device& device, const TensorType& type,
                                    const Status& status) {
  RowMajorLayout layout(type.dims.size());
  PJRT_Client_CreateErrorBuffer_Args args = {};
  args.client = device.client;
  args.error_code = static_cast<PJRT_ErrorCode>(status.code());
  args.error_message = status.message().data();
  args.error_message_size = status.message().size();
  args.shape_dims = type.dims.data();
  args.shape_num_dims = type.dims.size();
  args.shape_element_type = BufferTypeOf(type.dtype);
  args.shape_layout = layout.get();
  args.memory = device.memory;
  if (Status created = device.host->Call(args); !created.ok()) return created;
  if (args.buffer == nullptr) return WrongAnswer(args.kSlot, "gave no buffer");
  return args.buffer;
}

void Fail(const Device& device, const Promise& promise, const TensorType& type,
          const Status& status) {
  Result<PJRT_Buffer*> error = NewErrorBuffer(device, type, status);
  if (!error.ok()) return Fulfill(device, promise, nullptr, status);
  Fulfill(device, promise, *error, {});
  DestroyBuffer(*device.host, *error);
}

void SetEvent(const Host& host, PJRT_Event* event, const Status& status) {
  PJRT_Event_Set_Args args = {};
  args.event = event;
  args.error_code = static_cast<PJRT_ErrorCode>(status.code());
  args.error_message = status.message().data();
  args.error_message_size = status.message().size();
  (void)host.Call(args);
}

void RunAndFulfill(const Execution& execution, const std::vector<Promise>& promises,
                   PJRT_Event* done) {
  const Device& device = execution.program->device();
  std::vector<BufferRef> results;
  const Status status = RunAndWait(execution, &results);
  for (size_t i = 0; i < promises.size(); ++i) {
    if (status.ok()) {
      Fulfill(device, promises[i], results[i]->handle(), {});
    } else {
      Fail(device, promises[i], execution.program->output_types()[i], status);
    }
  }
  if (done != nullptr) SetEvent(*device.host, done, status);
}

Status StartLater(Execution execution, PJRT_LoadedExecutable_Execute_Args& args) {
  const Device& device = execution.program->device();
  std::vector<Promise> promises;
  PJRT_Event_Create_Args event = {};
  const Status prepared = [&]() -> Status {
    for (const TensorType& type : execution.program->output_types()) {
      Result<Promise> promise = NewPromise(device, type);
      if (!promise.ok()) return promise.status();
      promises.push_back(*promise);
    }
    if (args.device_complete_events == nullptr) return {};
    if (Status status = device.host->Call(event); !status.ok()) return status;
    return event.event == nullptr ? WrongAnswer(event.kSlot, "gave no event") : Status();
  }();
  // Some hosts have the functions, and these say that they do nothing (metaljax).
  if (prepared.code() == Code::kUnimplemented && promises.empty()) return RunNow(execution, args);
  if (!prepared.ok()) {
    for (const Promise& promise : promises) {
      Fulfill(device, promise, nullptr, prepared);
      DestroyBuffer(*device.host, promise.handle);
    }
    ReleaseBuffers(*device.host, execution.arguments);
    return prepared;
  }
  for (size_t i = 0; i < promises.size(); ++i) args.output_lists[0][i] = promises[i].handle;
  if (args.device_complete_events != nullptr) args.device_complete_events[0] = event.event;
  RunLater([execution = std::move(execution), promises = std::move(promises), done = event.event] {
    RunAndFulfill(execution, promises, done);
  });
  return {};
}

}  // namespace

int64_t NumExecutions() { return num_executions.load(std::memory_order_relaxed); }

Status ExecuteProgram(const std::shared_ptr<const Program>& program,
                      PJRT_LoadedExecutable_Execute_Args& args) {
  if (args.num_devices != 1) {
    return Unimplemented("programs with custom calls run on one device, but got " +
                         std::to_string(args.num_devices) + ".");
  }
  const size_t num_inputs = program->donates().size();
  if (args.num_args != num_inputs) {
    return InvalidArgument("the program takes " + std::to_string(num_inputs) +
                           " arguments, but got " + std::to_string(args.num_args) + ".");
  }
  num_executions.fetch_add(1, std::memory_order_relaxed);
  Execution execution;
  execution.program = program;
  execution.arguments.assign(args.argument_lists[0], args.argument_lists[0] + num_inputs);
  execution.run_id = NewRunId();
  if (args.options->struct_size >= offsetof(PJRT_ExecuteOptions, context) + sizeof(void*) &&
      args.options->context != nullptr) {
    // A copy: the caller may destroy the context as soon as we return.
    execution.user_data = FindUserData(args.options->context);
  }
  Result<std::vector<bool>> expendable = AcquireBuffers(
      *program->device().host, execution.arguments, DonatedArguments(*program, args));
  if (!expendable.ok()) return expendable.status();
  execution.expendable = std::move(*expendable);
  if (CanRunLater(*program)) return StartLater(std::move(execution), args);
  return RunNow(execution, args);
}

}  // namespace jfm::pjrt
