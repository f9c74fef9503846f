#include "plugin/pjrt/custom_call/handler_registry.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "plugin/ffi/native_buffers.h"
#include "plugin/pjrt/custom_call/ffi_abi.h"
#include "plugin/pjrt/custom_call/runtime.h"

namespace jfm::pjrt {
namespace {

struct Registry {
  std::shared_mutex mutex;  // protects the rest
  std::string platform = "flash_metal";
  std::map<std::string, Handler> handlers;
  std::map<int64_t, TypeInfo> types;
  // Far from the ids that other runtimes in this process count up from 1: types registered
  // there come to us with their ids.
  int64_t next_type_id = int64_t{1} << 40;
};

// Never destroyed: calls may still run when the process ends.
Registry& GetRegistry() {
  static Registry& registry = *new Registry;
  return registry;
}

bool SameFunctions(const HandlerStages& a, const HandlerStages& b) {
  return a.instantiate == b.instantiate && a.prepare == b.prepare && a.initialize == b.initialize &&
         a.execute == b.execute;
}

struct Answer {
  int32_t minor = 0;
  bool takes_native_buffers = false;
};

// XLA's question before the first call: with which version of the API were you compiled?
// And ours behind it, where XLA's own handlers do not look.
Result<Answer> Ask(void* function) {
  struct {
    XLA_FFI_MetadataWithState metadata;
    char room[64];  // for what newer versions may write behind it
  } answer = {};
  XLA_FFI_Metadata& metadata = answer.metadata.metadata;
  metadata.struct_size = XLA_FFI_SIZE(XLA_FFI_Metadata, traits);
  metadata.api_version = {XLA_FFI_SIZE(XLA_FFI_Version, minor), nullptr, -1, -1};
  JfmCapabilitiesExtension capabilities = {
      {sizeof(capabilities), kJfmExtensionCapabilities, nullptr}, 0};
  XLA_FFI_MetadataExtension extension = {{XLA_FFI_SIZE(XLA_FFI_MetadataExtension, metadata),
                                          kXlaFfiExtensionMetadata, &capabilities.base},
                                         &metadata};
  XLA_FFI_CallFrameWithFuture call = {};
  call.frame.struct_size = XLA_FFI_SIZE(XLA_FFI_CallFrame, attributes);
  call.frame.extensions = &extension.base;
  call.frame.api = ApiForMinor(kXlaFfiNewestMinor);
  call.frame.stage = XLA_FFI_EXECUTE;  // what XLA says here, whatever the function's stage
  call.frame.arguments.struct_size = sizeof(XLA_FFI_Values);
  call.frame.results.struct_size = sizeof(XLA_FFI_Values);
  call.frame.attributes.struct_size = sizeof(XLA_FFI_Attributes);
  if (Status status = CallHandler(function, &call); !status.ok()) {
    return Status(status.code(), "it did not tell its FFI version: " + status.message());
  }
  const XLA_FFI_Version& version = metadata.api_version;
  if (version.major == -1) return InvalidArgument("it did not tell its FFI version");
  if (version.major != kXlaFfiApiMajor || version.minor < 1 || version.minor > kXlaFfiNewestMinor) {
    return InvalidArgument("it was compiled with version " + std::to_string(version.major) + "." +
                           std::to_string(version.minor) +
                           " of XLA's FFI headers; the known ones are 0.1 to 0." +
                           std::to_string(kXlaFfiNewestMinor));
  }
  return Answer{version.minor, capabilities.takes_native_buffers != 0};
}

Status Refused(const std::string& name, const Status& status) {
  return {status.code(),
          "FFI handler " + name + " cannot be registered: " + status.message() + "."};
}

}  // namespace

Status RegisterHandler(const std::string& name, const HandlerStages& stages) {
  if (stages.api_version != 1) {
    return Refused(name, Unimplemented("only typed FFI handlers can be called (api_version 1), "
                                       "and this one has api_version " +
                                       std::to_string(stages.api_version)));
  }
  if (stages.execute == nullptr) {
    return Refused(name, InvalidArgument("it has no function for the execute stage"));
  }
  Handler handler;
  handler.name = name;
  handler.stages = stages;
  void* const functions[] = {stages.instantiate, stages.prepare, stages.initialize, stages.execute};
  for (int stage = XLA_FFI_INSTANTIATE; stage <= XLA_FFI_EXECUTE; ++stage) {
    if (functions[stage] == nullptr) continue;
    const Result<Answer> answer = Ask(functions[stage]);
    if (!answer.ok()) return Refused(name, answer.status());
    handler.functions[stage] = {functions[stage], answer->minor};
    // The last one asked is the execute stage.
    handler.takes_native_buffers = answer->takes_native_buffers;
  }
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  const auto [entry, is_new] = registry.handlers.emplace(name, std::move(handler));
  if (is_new || SameFunctions(entry->second.stages, stages)) return {};
  return Refused(name, {Code::kAlreadyExists, "there is another one of that name already"});
}

Status RegisterHandlerOfPlatform(const std::string& name, const std::string& platform,
                                 const HandlerStages& stages) {
  Registry& registry = GetRegistry();
  std::string ours;
  {
    std::shared_lock<std::shared_mutex> lock(registry.mutex);
    ours = registry.platform;
  }
  if (platform == ours) return RegisterHandler(name, stages);
  return Refused(name, InvalidArgument("it is for platform " + platform + ", and this is " + ours));
}

void SetHandlerPlatform(const std::string& platform) {
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.platform = platform;
}

std::optional<Handler> FindHandler(const std::string& name) {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  const auto found = registry.handlers.find(name);
  if (found == registry.handlers.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> RegisteredTargets() {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  std::vector<std::string> names;
  for (const auto& entry : registry.handlers) names.push_back(entry.first);
  return names;
}

std::string RegisteredTargetsText() {
  const std::string names = Join(RegisteredTargets());
  return names.empty() ? "none" : names;
}

Status RegisterType(const std::string& name, int64_t* type_id, void (*deleter)(void*)) {
  if (type_id == nullptr) return InvalidArgument("the type id of " + name + " is a null pointer");
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  for (auto& [id, type] : registry.types) {
    if (type.name == name) {
      if (*type_id != id) {
        return {Code::kAlreadyExists,
                "FFI type " + name + " is registered already, with type id " + std::to_string(id)};
      }
      // Whoever knew it by its id alone did not know the deleter.
      if (type.deleter == nullptr) type.deleter = deleter;
      return {};
    }
    if (*type_id == id) {
      return {Code::kAlreadyExists, "FFI type " + name + " has type id " + std::to_string(id) +
                                        ", which is that of " + type.name};
    }
  }
  while (*type_id == 0) {
    const int64_t next = registry.next_type_id++;
    if (registry.types.count(next) == 0) *type_id = next;
  }
  registry.types.emplace(*type_id, TypeInfo{name, deleter});
  return {};
}

std::optional<TypeInfo> FindType(int64_t type_id) {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  const auto found = registry.types.find(type_id);
  if (found == registry.types.end()) return std::nullopt;
  return found->second;
}

}  // namespace jfm::pjrt
