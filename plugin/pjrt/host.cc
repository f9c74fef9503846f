// Loads the library and decides which of its slots can be trusted.
#include "plugin/pjrt/host.h"

#include <dlfcn.h>

#include <algorithm>

#include "plugin/pjrt/error.h"

namespace jfm::pjrt {
namespace {

constexpr const char* kSlotNames[] = {
#define JFM_PJRT_SLOT(name) "PJRT_" #name,
    JFM_PJRT_SLOTS(JFM_PJRT_SLOT)
#undef JFM_PJRT_SLOT
};

Status Refuse(const std::string& path, const std::string& why) {
  return {Code::kFailedPrecondition, "the host plugin " + path + " " + why};
}

}  // namespace

Status WrongAnswer(Slot slot, const std::string& what) {
  return Internal(std::string("the host plugin's ") + kSlotNames[static_cast<size_t>(slot)] +
                  " succeeded, but it " + what + ".");
}

Result<std::unique_ptr<const Host>> Host::Load(const std::string& path) {
  // RTLD_LOCAL: the host brings its own copy of XLA, which must stay apart from jaxlib's.
  // Never closed: XLA leaves threads behind.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Refuse(path, std::string("cannot be loaded: ") + dlerror());
  using GetApi = const PJRT_Api* (*)();
  const GetApi get_api = reinterpret_cast<GetApi>(dlsym(library, "GetPjrtApi"));
  if (get_api == nullptr) return Refuse(path, "is not a PJRT plugin: it has no GetPjrtApi.");
  const PJRT_Api* api = get_api();
  if (api == nullptr || api->struct_size <= kApiHeaderSize) return Refuse(path, "gave no API.");
  if (api->version.major != 0) {
    return Refuse(path, "has PJRT API version " + std::to_string(api->version.major) + "." +
                            std::to_string(api->version.minor) + ", but 0.x is needed.");
  }
  if (api->version.minor < kOldestMinor) {
    return Refuse(path, "has PJRT API version 0." + std::to_string(api->version.minor) +
                            ", which is too old: at least 0." + std::to_string(kOldestMinor) +
                            " is needed.");
  }
  std::unique_ptr<Host> host(new Host);
  host->api_ = api;
  host->minor_ = api->version.minor;
  const size_t known = host->minor_ < kRearrangedMinor ? kNumStableSlots : kNumSlots;
  host->num_slots_ = std::min(known, (api->struct_size - kApiHeaderSize) / sizeof(PJRT_Function));
  std::copy_n(api->slots, host->num_slots_, host->functions_);
  PJRT_Plugin_Initialize_Args args = {};
  if (Status status = host->Call(args); !status.ok()) {
    return Refuse(path, "does not start: " + status.message());
  }
  return std::unique_ptr<const Host>(std::move(host));
}

PJRT_Error* Host::Forward(Slot slot, void* args) const {
  const PJRT_Function function = functions_[static_cast<size_t>(slot)];
  if (function == nullptr) {
    return NewError(Unimplemented(std::string("the host plugin has no ") +
                                  kSlotNames[static_cast<size_t>(slot)] + "."));
  }
  if (!PaddedStruct::Fits(args)) return function(args);
  PaddedStruct padded(args);
  PJRT_Error* error = function(padded.bytes);
  padded.CopyBack(args);
  return error;
}

Status Host::TakeError(PJRT_Error* error) const {
  if (error == nullptr) return {};
  if (IsOurError(error)) {
    const char* message = nullptr;
    size_t size = 0;
    ErrorMessage(error, &message, &size);
    Status status(static_cast<Code>(ErrorCode(error)), std::string(message, size));
    DestroyError(error);
    return status;
  }
  PJRT_Error_GetCode_Args code = {};
  code.struct_size = sizeof(code);
  code.error = error;
  PJRT_Error_Message_Args message = {};
  message.struct_size = sizeof(message);
  message.error = error;
  // Not through Call: an error of these would call them again.
  functions_[static_cast<size_t>(Slot::kError_GetCode)](&code);
  functions_[static_cast<size_t>(Slot::kError_Message)](&message);
  std::string text = "the host plugin gave no message.";
  if (message.message != nullptr) text.assign(message.message, message.message_size);
  // An error that says that it is none would count as a success.
  const Code kind = code.code == 0 ? Code::kUnknown : static_cast<Code>(code.code);
  Status status(kind, std::move(text));
  PJRT_Error_Destroy_Args destroy = {};
  destroy.struct_size = sizeof(destroy);
  destroy.error = error;
  functions_[static_cast<size_t>(Slot::kError_Destroy)](&destroy);
  return status;
}

}  // namespace jfm::pjrt
