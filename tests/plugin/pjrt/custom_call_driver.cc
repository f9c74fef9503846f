// The registry of handlers and single custom calls for ctypes, without hosts or programs.
// A call comes as a plan that has nothing but it. Test code.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/custom_call/custom_call.h"
#include "plugin/pjrt/custom_call/ffi_extension.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "plugin/pjrt/plan.h"

namespace jfm::pjrt {
namespace {

struct Call {
  std::unique_ptr<CustomCall> call;
};

struct Addresses {
  void* const* data;
  size_t count;

  std::vector<void*> Vector() const { return std::vector<void*>(data, data + count); }
};

struct Error {
  char* text;
  size_t size;

  int Set(const Status& status) const {
    std::snprintf(text, size, "%s", status.message().c_str());
    return static_cast<int>(status.code());
  }
};

struct Context {
  int64_t run_id;
  int32_t device_ordinal;
  int64_t user_data_type;  // 0: none
  void* user_data;
};

}  // namespace

extern "C" JFM_EXPORT int jfm_test_register(const char* name, void* const stages[4],
                                            int api_version, const Error* error) {
  return error->Set(
      RegisterHandler(name, {stages[0], stages[1], stages[2], stages[3], api_version, 0}));
}

extern "C" JFM_EXPORT int jfm_test_register_type(const char* name, int64_t* type_id,
                                                 void (*deleter)(void*), const Error* error) {
  return error->Set(RegisterType(name, type_id, deleter));
}

extern "C" JFM_EXPORT int jfm_test_create(const char* plan_bytes, size_t size, Call** out,
                                          const Error* error) {
  Result<Plan> plan = DecodePlan(std::string(plan_bytes, size));
  if (!plan.ok()) return error->Set(plan.status());
  Result<std::unique_ptr<CustomCall>> call = CustomCall::Create(plan->calls.at(0).spec);
  if (!call.ok()) return error->Set(call.status());
  *out = new Call{std::move(*call)};
  return 0;
}

extern "C" JFM_EXPORT void jfm_test_destroy(Call* call) { delete call; }

extern "C" JFM_EXPORT int jfm_test_execute(const Call* call, const Addresses* operands,
                                           const Addresses* results, const Context* context,
                                           const Error* error) {
  UserData user_data;
  if (context->user_data_type != 0) {
    const Status status = user_data.Add(context->user_data_type, context->user_data);
    if (!status.ok()) return error->Set(status);
  }
  const ExecuteContext execute = {&user_data, context->run_id, context->device_ordinal};
  return error->Set(call->call->Execute(operands->Vector(), results->Vector(), execute));
}

extern "C" JFM_EXPORT int jfm_test_takes_native(const Call* call) {
  return call->call->takes_native_buffers();
}

// With objects of the device, which only the handler looks at.
extern "C" JFM_EXPORT int jfm_test_execute_native(const Call* call, const Addresses* operands,
                                                  const Addresses* results, const Error* error) {
  return error->Set(call->call->ExecuteNative(operands->Vector(), results->Vector(), {}));
}

// Nanoseconds per execution.
extern "C" JFM_EXPORT double jfm_test_time(const Call* call, const Addresses* operands,
                                           const Addresses* results, int repeats) {
  const std::vector<void*> inputs = operands->Vector();
  const std::vector<void*> outputs = results->Vector();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    if (!call->call->Execute(inputs, outputs, {}).ok()) return -1;
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  return time.count() / repeats;
}

extern "C" JFM_EXPORT PJRT_Extension* jfm_test_extension(PJRT_Extension* host_node,
                                                         PJRT_Extension* next) {
  // The test only asks whether there is an error, and which.
  const auto create_error = [](const Status& status) {
    return reinterpret_cast<PJRT_Error*>(new Status(status));
  };
  return MakeFfiExtension("flash_metal", host_node, next, create_error);
}

extern "C" JFM_EXPORT int jfm_test_take_error(PJRT_Error* error, const Error* out) {
  const std::unique_ptr<Status> status(reinterpret_cast<Status*>(error));
  return status == nullptr ? 0 : out->Set(*status);
}

extern "C" JFM_EXPORT void* jfm_test_user_data(const PJRT_ExecuteContext* context,
                                               int64_t type_id) {
  return FindUserData(context).values.Find(type_id);
}

extern "C" JFM_EXPORT void jfm_test_forget(const PJRT_ExecuteContext* context) {
  ForgetUserData(context);
}

}  // namespace jfm::pjrt
