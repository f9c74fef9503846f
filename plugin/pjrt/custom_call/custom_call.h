// Calls one typed FFI handler for one call site of a loaded program: we are XLA here.
// Who owns the buffers, and when to call, is the executor's affair.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plugin/pjrt/custom_call/types.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// What handlers may ask about the execution of the program that calls them.
struct ExecuteContext {
  const UserData* user_data = nullptr;
  int64_t run_id = 0;  // the same for every call of one execution; see NewRunId
  int32_t device_ordinal = 0;
};
int64_t NewRunId();

// Immutable after Create; Execute may run on several threads at once.
class CustomCall {
 public:
  // Finds the handler (NotFound names the target and the registered ones) and runs its
  // instantiate stage, whose state lives as long as this object.
  static Result<std::unique_ptr<CustomCall>> Create(const CallSpec& spec,
                                                    const UserData* user_data = nullptr);
  virtual ~CustomCall() = default;

  // Runs prepare, initialize and execute and waits for the handler's futures. One pointer
  // per operand and result of the spec; for tokens null, for empty arrays anything. An
  // aliased operand and result simply have the same pointer. Errors have the handler's
  // code and "FFI handler <target>: [<stage>] <its message>". No exceptions.
  virtual Status Execute(const std::vector<void*>& operands, const std::vector<void*>& results,
                         const ExecuteContext& context) const = 0;

  // The same with objects of the device (plugin/ffi/native_buffers.h) instead of addresses,
  // null for empty arrays. Only of handlers that take them.
  virtual bool takes_native_buffers() const = 0;
  virtual Status ExecuteNative(const std::vector<void*>& operands,
                               const std::vector<void*>& results,
                               const ExecuteContext& context) const = 0;
};

}  // namespace jfm::pjrt
