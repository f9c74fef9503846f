// Helpers from the thread pool that XLA runs a program's other operations on.
#pragma once

#include "plugin/cpu/workers.h"
#include "plugin/ffi/xla_ffi.h"

namespace jfm {

class XlaThreadPool : public cpu::HelperSource {
 public:
  // Of the call that this frame is for; use it during the call.
  explicit XlaThreadPool(const XLA_FFI_CallFrame& frame)
      : api_(frame.api), context_(frame.context) {}

  bool Schedule(void (*task)(void*), void* data) override;

 private:
  const XLA_FFI_Api* api_;
  void* context_;
};

}  // namespace jfm
