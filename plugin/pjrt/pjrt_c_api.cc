// Strings in, strings out; the work is done elsewhere.
#include "plugin/pjrt/pjrt_c_api.h"

#include <cstdio>
#include <string>

#include "plugin/c_boundary.h"
#include "plugin/pjrt/buffers.h"
#include "plugin/pjrt/compile.h"
#include "plugin/pjrt/custom_call/handler_registry.h"
#include "plugin/pjrt/dispatch.h"
#include "plugin/pjrt/custom_call/ffi_abi.h"
#include "plugin/pjrt/executor.h"
#include "plugin/pjrt/old_host.h"
#include "plugin/pjrt/plugin.h"

namespace jfm::pjrt {
namespace {

template <class Function>
int Report(char* error, size_t error_size, Function&& function) {
  const Status status = WithoutExceptions(function);
  if (error != nullptr && error_size > 0) {
    std::snprintf(error, error_size, "%s", status.message().c_str());
  }
  return static_cast<int>(status.code());
}

std::string Line(const char* key, int64_t value) {
  return std::string(key) + "=" + std::to_string(value) + "\n";
}

template <class Function>
int Describe(char* text, size_t text_size, Function&& function) {
  std::string description;
  const Status status = WithoutExceptions([&]() -> Status { return function(description); });
  std::snprintf(text, text_size, "%s",
                status.ok() ? description.c_str() : status.message().c_str());
  return static_cast<int>(status.code());
}

}  // namespace
}  // namespace jfm::pjrt

using namespace jfm::pjrt;

extern "C" {

JFM_EXPORT int jfm_pjrt_configure(const char* host_path, const char* platform_name,
                                  const char* host_buffers, int flags,
                                  JfmPartitionFunction partition, char* error, size_t error_size) {
  return Report(error, error_size, [&] {
    return ConfigurePlugin({host_path, platform_name, host_buffers, flags, partition});
  });
}

JFM_EXPORT int jfm_pjrt_host_facts(char* text, size_t text_size) {
  return Describe(text, text_size, [](std::string& facts) -> jfm::Status {
    const Plugin* plugin = ThePlugin();
    if (plugin == nullptr) return {jfm::Code::kFailedPrecondition, "no host is configured."};
    facts = "api_version=0." + std::to_string(plugin->host->minor()) + "\n" +
            Line("num_slots", static_cast<int64_t>(plugin->host->num_slots())) +
            Line("old_host", plugin->is_old_host()) + "stablehlo=";
    if (plugin->is_old_host()) {
      for (int64_t part : kOldHostStablehloVersion) {
        facts += (facts.back() == '=' ? "" : ".") + std::to_string(part);
      }
    }
    facts += "\n";
    if (const std::shared_ptr<const ClientState> client = AnyClient()) {
      facts += "platform_name=" + client->identity.platform_name +
               "\nplatform_version=" + client->identity.platform_version +
               "\nhandover=" + client->access.handover + "\n";
    }
    return {};
  });
}

JFM_EXPORT int jfm_pjrt_register_handler(const char* name, size_t name_size, void* instantiate,
                                         void* prepare, void* initialize, void* execute,
                                         int api_version, unsigned traits, char* error,
                                         size_t error_size) {
  return Report(error, error_size, [&] {
    return RegisterHandler(std::string(name, name_size),
                           {instantiate, prepare, initialize, execute, api_version, traits});
  });
}

JFM_EXPORT int jfm_pjrt_register_type(const char* name, size_t name_size, void* type_id,
                                      void* type_info, char* error, size_t error_size) {
  return Report(error, error_size, [&] {
    const auto* info = static_cast<const XLA_FFI_TypeInfo*>(type_info);
    return RegisterType(std::string(name, name_size), static_cast<int64_t*>(type_id),
                        info == nullptr ? nullptr : info->deleter);
  });
}

JFM_EXPORT void jfm_pjrt_stop_partitioning(void) { StopAskingPython(); }

JFM_EXPORT void jfm_pjrt_plan_every_program(int yes) { PlanEveryProgram(yes != 0); }

JFM_EXPORT int jfm_pjrt_registered_targets(char* text, size_t text_size) {
  return Describe(text, text_size, [](std::string& names) -> jfm::Status {
    for (const std::string& name : RegisteredTargets()) names += name + "\n";
    return {};
  });
}

JFM_EXPORT int jfm_pjrt_statistics(char* text, size_t text_size) {
  return Describe(text, text_size, [](std::string& lines) -> jfm::Status {
    lines = Line("programs", NumPrograms()) + Line("segments", NumSegments()) +
            Line("executions", NumExecutions()) + Line("calls", NumCallsRun()) +
            Line("live_buffers", NumLiveBuffers());
    return {};
  });
}

}  // extern "C"
