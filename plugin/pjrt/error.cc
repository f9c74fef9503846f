// One struct and the table of functions that newer callers reach through its first word.
#include "plugin/pjrt/error.h"

#include <new>
#include <string>

namespace jfm::pjrt {
namespace {

struct OurError : PJRT_Error {
  PJRT_ErrorCode code;
  std::string message;
};

// What the host attached to an error beside its text (payloads) is not carried over.
void NoPayloads(const PJRT_Error*, PJRT_PayloadVisitor, void*) {}

const PJRT_ErrorFunctions kFunctions = {sizeof(PJRT_ErrorFunctions), sizeof(OurError), nullptr,
                                        DestroyError,                ErrorMessage,     ErrorCode,
                                        NoPayloads};

}  // namespace

PJRT_Error* NewError(const Status& status) {
  if (status.ok()) return nullptr;
  OurError* error = new OurError;
  error->functions = &kFunctions;
  error->code = static_cast<PJRT_ErrorCode>(status.code());
  error->message = status.message();
  return error;
}

bool IsOurError(const PJRT_Error* error) {
  // The first word of a host's error is whatever it likes, but never this address.
  return error != nullptr && error->functions == &kFunctions;
}

void DestroyError(PJRT_Error* error) { delete static_cast<OurError*>(error); }

void ErrorMessage(const PJRT_Error* error, const char** message, size_t* message_size) {
  const OurError& ours = *static_cast<const OurError*>(error);
  *message = ours.message.c_str();
  *message_size = ours.message.size();
}

PJRT_ErrorCode ErrorCode(const PJRT_Error* error) {
  return static_cast<const OurError*>(error)->code;
}

}  // namespace jfm::pjrt
