#include "plugin/pjrt/custom_call/ffi_extension.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/custom_call/handler_registry.h"

namespace jfm::pjrt {
namespace {

// -- The node's ABI -----------------------------------------------------------------

struct FfiNode {
  PJRT_Extension base;
  PJRT_Function type_register;
  PJRT_Function user_data_add;
  PJRT_Function register_handler;  // not in the oldest nodes
};
static_assert(sizeof(FfiNode) == 48, "PJRT's layout");

struct PJRT_TypeInfo {
  void (*deleter)(void* object);
};

struct TypeRegisterArgs {
  size_t struct_size;
  PJRT_Extension* extensions;
  const char* name;
  size_t name_size;
  int64_t type_id;            // in and out
  const PJRT_TypeInfo* info;  // newer headers only
};
constexpr size_t kOldTypeRegisterSize = offsetof(TypeRegisterArgs, info);

struct UserDataAddArgs {
  size_t struct_size;
  PJRT_Extension* extensions;
  PJRT_ExecuteContext* context;
  int64_t type_id;
  void* data;
  void (*deleter)(void* data);  // older headers only
};
constexpr size_t kNewUserDataAddSize = offsetof(UserDataAddArgs, deleter);

struct RegisterHandlerArgs {
  size_t struct_size;
  const char* target;
  size_t target_size;
  void* handler;
  const char* platform;
  size_t platform_size;
  uint32_t traits;
};
constexpr size_t kRegisterHandlerSize = offsetof(RegisterHandlerArgs, traits) + sizeof(uint32_t);

// The same function's arguments in older headers. Sizes do not tell the two apart, since
// some callers count the padding at the end.
struct OldRegisterHandlerArgs {
  size_t struct_size;
  const char* target;
  size_t target_size;
  int32_t api_version;
  void* handler;
  const char* platform;
  size_t platform_size;
};

// -- State --------------------------------------------------------------------------

struct ContextData {
  UserData values;
  std::vector<std::pair<void*, void (*)(void*)>> owned;

  ~ContextData() {
    for (const auto& [data, deleter] : owned) deleter(data);
  }
};

struct Extension {
  FfiNode node = {};
  std::string platform;
  const FfiNode* host = nullptr;
  CreateErrorFunction create_error = nullptr;
};
Extension* extension = nullptr;  // never destroyed

std::shared_mutex context_mutex;  // protects Contexts()
std::map<const PJRT_ExecuteContext*, std::shared_ptr<ContextData>>& Contexts() {
  static auto& contexts = *new std::map<const PJRT_ExecuteContext*, std::shared_ptr<ContextData>>;
  return contexts;
}

// -- The node's functions -----------------------------------------------------------

template <class Args, Status (*function)(Args*, PJRT_Error** host_error)>
PJRT_Error* Entry(void* args) noexcept {
  PJRT_Error* host_error = nullptr;
  const Status status = WithoutExceptions(
      [&]() -> Status { return function(static_cast<Args*>(args), &host_error); });
  if (host_error != nullptr) return host_error;
  return status.ok() ? nullptr : extension->create_error(status);
}

Status TooSmall(const char* what, size_t expected, size_t got) {
  return InvalidArgument(std::string("the arguments of ") + what + " must have at least " +
                         std::to_string(expected) + " bytes, but got " + std::to_string(got));
}

Status TypeRegister(TypeRegisterArgs* args, PJRT_Error**) {
  if (args->struct_size < kOldTypeRegisterSize) {
    return TooSmall("the FFI extension's Type_Register", kOldTypeRegisterSize, args->struct_size);
  }
  const bool has_info = args->struct_size >= sizeof(TypeRegisterArgs) && args->info != nullptr;
  return RegisterType(std::string(args->name, args->name_size), &args->type_id,
                      has_info ? args->info->deleter : nullptr);
}

// For our handlers here; and for the host's, which may be called in the same execution.
Status UserDataAdd(UserDataAddArgs* args, PJRT_Error** host_error) {
  if (args->struct_size < kNewUserDataAddSize) {
    return TooSmall("the FFI extension's UserData_Add", kNewUserDataAddSize, args->struct_size);
  }
  if (args->context == nullptr) return InvalidArgument("user data needs an execute context");
  {
    std::unique_lock<std::shared_mutex> lock(context_mutex);
    std::shared_ptr<ContextData>& entry = Contexts()[args->context];
    if (entry == nullptr) entry = std::make_shared<ContextData>();
    if (Status status = entry->values.Add(args->type_id, args->data); !status.ok()) return status;
    if (args->struct_size >= sizeof(UserDataAddArgs) && args->deleter != nullptr) {
      entry->owned.emplace_back(args->data, args->deleter);
    }
  }
  if (extension->host == nullptr) return {};
  UserDataAddArgs copy = *args;
  copy.deleter = nullptr;  // one owner is enough
  copy.struct_size = sizeof(copy);
  *host_error = extension->host->user_data_add(&copy);
  return {};
}

// True where the new layout has the platform's size and the old one its address.
bool IsNewLayout(const RegisterHandlerArgs& args) { return args.platform_size < 4096; }

Status RegisterTarget(RegisterHandlerArgs* args, PJRT_Error** host_error) {
  if (args->struct_size < kRegisterHandlerSize) {
    return TooSmall("the FFI extension's Register_Handler", kRegisterHandlerSize,
                    args->struct_size);
  }
  HandlerStages stages;
  RegisterHandlerArgs request = {};
  if (IsNewLayout(*args)) {
    std::memcpy(&request, args, kRegisterHandlerSize);
  } else {
    const auto& old = *reinterpret_cast<const OldRegisterHandlerArgs*>(args);
    request.target = old.target;
    request.target_size = old.target_size;
    request.handler = old.handler;
    request.platform = old.platform;
    request.platform_size = old.platform_size;
    stages.api_version = old.api_version;
  }
  stages.execute = request.handler;
  stages.traits = request.traits;
  const std::string name(request.target, request.target_size);
  const std::string platform(request.platform, request.platform_size);
  const FfiNode* host = extension->host;
  const bool host_takes_handlers = host != nullptr && host->base.struct_size >= sizeof(FfiNode) &&
                                   host->register_handler != nullptr;
  if (platform == extension->platform || !host_takes_handlers) {
    return RegisterHandlerOfPlatform(name, platform, stages);
  }
  request.struct_size = kRegisterHandlerSize;
  *host_error = host->register_handler(&request);
  return {};
}

}  // namespace

PJRT_Extension* MakeFfiExtension(const std::string& platform_name, const PJRT_Extension* host_node,
                                 PJRT_Extension* next, CreateErrorFunction create_error) {
  SetHandlerPlatform(platform_name);
  extension = new Extension;
  extension->platform = platform_name;
  extension->host = reinterpret_cast<const FfiNode*>(host_node);
  extension->create_error = create_error;
  extension->node = {{sizeof(FfiNode), PJRT_ExtensionType_FFI, next},
                     &Entry<TypeRegisterArgs, TypeRegister>,
                     &Entry<UserDataAddArgs, UserDataAdd>,
                     &Entry<RegisterHandlerArgs, RegisterTarget>};
  return &extension->node.base;
}

AttachedData FindUserData(const PJRT_ExecuteContext* context) {
  std::shared_lock<std::shared_mutex> lock(context_mutex);
  const auto found = Contexts().find(context);
  if (found == Contexts().end()) return {};
  return {found->second->values, found->second};
}

void ForgetUserData(const PJRT_ExecuteContext* context) {
  std::shared_ptr<ContextData> forgotten;  // deleters run without the lock
  std::unique_lock<std::shared_mutex> lock(context_mutex);
  const auto found = Contexts().find(context);
  if (found == Contexts().end()) return;
  forgotten = std::move(found->second);
  Contexts().erase(found);
  lock.unlock();
}

}  // namespace jfm::pjrt
