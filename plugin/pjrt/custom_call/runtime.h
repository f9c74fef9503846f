// What the functions of the FFI's table work on: errors, futures, states and the context
// of one call; and the tables themselves. Only this folder includes it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plugin/pjrt/custom_call/custom_call.h"
#include "plugin/pjrt/custom_call/ffi_abi.h"
#include "plugin/status.h"

struct XLA_FFI_Error {
  jfm::Status status;
};

namespace jfm::pjrt {

// What a handler left behind at one stage, for later ones of the same call site.
class State {
 public:
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (object_ != nullptr) deleter_(object_);
  }

  Status Set(int64_t type_id, void* object, void (*deleter)(void*));
  Result<void*> Get(int64_t type_id) const;

 private:
  int64_t type_id_ = 0;
  void* object_ = nullptr;
  void (*deleter_)(void*) = nullptr;
};

// Memory that a handler asked for; what it did not free goes when the call is over.
class ScratchMemory {
 public:
  ScratchMemory() = default;
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  ~ScratchMemory();

  Result<void*> Allocate(size_t size, size_t alignment);
  Status Free(void* data);

 private:
  std::mutex mutex_;  // protects blocks_: a handler's tasks may allocate too
  std::vector<void*> blocks_;
};

// Completion of an asynchronous handler.
class Completion {
 public:
  Status Wait();
  // False when it was set before.
  bool Set(Status status);

 private:
  std::mutex mutex_;  // protects the rest
  std::condition_variable changed_;
  bool done_ = false;
  Status status_;
};

// The three stages that may have a state, in the order of XLA_FFI_Stage.
constexpr int kNumStateStages = 3;

const char* StageName(int32_t stage);

// The functions for a handler that was compiled with version 0.`minor` of the API.
const XLA_FFI_Api* ApiForMinor(int32_t minor);

// Runs one stage's function with a complete frame and waits for its future. Its error
// comes as it is, but for a message that begins with "[<stage>] ".
Status CallHandler(void* function, XLA_FFI_CallFrameWithFuture* frame);

}  // namespace jfm::pjrt

struct XLA_FFI_Future {
  std::shared_ptr<jfm::pjrt::Completion> completion;
};

struct XLA_FFI_ExecutionContext {
  int32_t stage = 0;
  jfm::pjrt::ExecuteContext execution;
  jfm::pjrt::State* states[jfm::pjrt::kNumStateStages] = {};  // null: not there yet
  jfm::pjrt::ScratchMemory* memory = nullptr;                 // null at the instantiate stage
};
