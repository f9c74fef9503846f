// The typed FFI handlers that custom calls of this process may name, and the types of
// their states and contexts. Process-wide, safe from any thread; nothing is ever removed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plugin/ffi/xla_ffi.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// As registered: functions of type XLA_FFI_Error*(XLA_FFI_CallFrame*).
struct HandlerStages {
  void* instantiate = nullptr;  // optional
  void* prepare = nullptr;      // optional
  void* initialize = nullptr;   // optional
  void* execute = nullptr;
  int api_version = 1;  // of the registration: 1 = typed FFI, the only one that we can call
  uint32_t traits = 0;
};

// One stage's function, and the minor version of the FFI headers that it was compiled
// with; the major is 0.
struct HandlerFunction {
  void* function = nullptr;
  int32_t api_minor = 0;
};

struct Handler {
  std::string name;
  HandlerStages stages;                            // as registered
  HandlerFunction functions[XLA_FFI_EXECUTE + 1];  // by XLA_FFI_Stage
  // Its execute stage understands plugin/ffi/native_buffers.h.
  bool takes_native_buffers = false;
};

// Asks every stage for its metadata, as XLA does. Errors name the target: no execute
// stage, an untyped (api_version 0) function, an FFI version that we do not know.
// Registering the same functions again is fine; others: AlreadyExists.
Status RegisterHandler(const std::string& name, const HandlerStages& stages);

// The same for a handler that says for which platform it is: InvalidArgument unless that is
// ours, which is "flash_metal" until SetHandlerPlatform.
Status RegisterHandlerOfPlatform(const std::string& name, const std::string& platform,
                                 const HandlerStages& stages);
void SetHandlerPlatform(const std::string& platform);

std::optional<Handler> FindHandler(const std::string& name);
std::vector<std::string> RegisteredTargets();  // sorted
std::string RegisteredTargetsText();           // for messages; "none" if there are none

// -- Types of states and of user data -----------------------------------------------

// With *type_id == 0 assigns a new id, else takes the given one. The same name with the
// same id again is fine. `deleter` may be null: such a type cannot be a state (0.3+).
Status RegisterType(const std::string& name, int64_t* type_id, void (*deleter)(void*));

struct TypeInfo {
  std::string name;
  void (*deleter)(void*) = nullptr;
};
std::optional<TypeInfo> FindType(int64_t type_id);

}  // namespace jfm::pjrt
