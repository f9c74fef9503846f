#include "plugin/ffi/thread_pool.h"

namespace jfm {

bool XlaThreadPool::Schedule(void (*task)(void*), void* data) {
  // No pool is no error: the caller then works alone.
  if (context_ == nullptr || api_ == nullptr ||
      api_->struct_size < XLA_FFI_SIZE(XLA_FFI_Api, thread_pool_schedule) ||
      api_->thread_pool_schedule == nullptr) {
    return false;
  }
  XLA_FFI_ThreadPoolScheduleArgs args = {};
  args.struct_size = XLA_FFI_SIZE(XLA_FFI_ThreadPoolScheduleArgs, data);
  args.context = context_;
  args.task = task;
  args.data = data;
  XLA_FFI_Error* error = api_->thread_pool_schedule(&args);
  if (error == nullptr) return true;
  if (api_->error_destroy != nullptr) {
    XLA_FFI_ErrorDestroyArgs destroy = {};
    destroy.struct_size = XLA_FFI_SIZE(XLA_FFI_ErrorDestroyArgs, error);
    destroy.error = error;
    api_->error_destroy(&destroy);
  }
  return false;
}

}  // namespace jfm
