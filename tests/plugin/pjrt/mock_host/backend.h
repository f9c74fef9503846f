// The CPU plugin that does the mock host's work: calls of it, and errors in the mock's own
// layout, which is none that a caller could look into.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "plugin/pjrt/pjrt_api.h"

namespace mock {

using namespace jfm::pjrt;  // NOLINT: the API's structs and slots

constexpr int kUnknown = 2;
constexpr int kInvalidArgument = 3;
constexpr int kNotFound = 5;
constexpr int kFailedPrecondition = 9;
constexpr int kUnimplemented = 12;
constexpr int kInternal = 13;

inline const PJRT_Api* backend = nullptr;

// No table of functions in front: whoever looks for one finds no address.
struct MockError {
  uint64_t not_an_address = 0x4d4f434b4d4f434b;
  int32_t code;
  std::string text;
};

inline PJRT_Error* Error(int code, std::string text) {
  MockError* error = new MockError;
  error->code = code;
  error->text = std::move(text);
  return reinterpret_cast<PJRT_Error*>(error);
}
inline PJRT_Error* Unsupported(const char* what) {
  return Error(kUnimplemented, std::string(what) + " is not supported.");
}

// The backend's struct may be longer than the caller's, which is of this host's version.
struct Padded {
  explicit Padded(const void* args) {
    std::memcpy(&size, args, sizeof(size));
    std::memcpy(bytes, args, std::min(size, sizeof(bytes)));
    const size_t padded = sizeof(bytes);
    std::memcpy(bytes, &padded, sizeof(padded));
    // What callers chain to arguments is for newer plugins.
    std::memset(bytes + offsetof(PJRT_Error_Destroy_Args, extensions), 0, sizeof(void*));
  }
  void CopyBack(void* args) {
    const size_t start = offsetof(PJRT_Error_Destroy_Args, error);
    if (size > start) {
      std::memcpy(static_cast<char*>(args) + start, bytes + start, size - start);
    }
  }
  size_t size;
  alignas(16) char bytes[256] = {};
};

inline PJRT_Error* CallBackend(Slot slot, void* args) {
  Padded padded(args);
  PJRT_Error* error = backend->slots[static_cast<size_t>(slot)](padded.bytes);
  padded.CopyBack(args);
  return error;
}

inline PJRT_Error* TakeError(PJRT_Error* theirs) {
  if (theirs == nullptr) return nullptr;
  PJRT_Error_GetCode_Args code = {sizeof(code), nullptr, theirs, 0};
  CallBackend(Slot::kError_GetCode, &code);
  PJRT_Error_Message_Args message = {sizeof(message), nullptr, theirs, nullptr, 0};
  CallBackend(Slot::kError_Message, &message);
  PJRT_Error* error = Error(code.code, std::string(message.message, message.message_size));
  PJRT_Error_Destroy_Args destroy = {sizeof(destroy), nullptr, theirs};
  CallBackend(Slot::kError_Destroy, &destroy);
  return error;
}

template <class Args>
PJRT_Error* ToBackend(Args* args) {
  return TakeError(CallBackend(Args::kSlot, args));
}

// The same for what the mock itself asks; what is not granted ends the process.
template <class Args>
void Demand(Args& args) {
  args.struct_size = sizeof(args);
  if (PJRT_Error* error = ToBackend(&args)) {
    std::fprintf(stderr, "mock host: %s\n", reinterpret_cast<MockError*>(error)->text.c_str());
    std::abort();
  }
}

}  // namespace mock
