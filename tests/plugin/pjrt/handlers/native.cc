// A handler that takes objects of the device instead of addresses, and tells what it got.
#include <initializer_list>

#include "plugin/ffi/native_buffers.h"

namespace {

// Of the last call at the execute stage.
int is_native = -1;
int64_t num_values = 0;
void* values[8];
int num_native_stages = 0;

const XLA_FFI_Extension* Find(const XLA_FFI_CallFrame& frame, int32_t type) {
  const XLA_FFI_Extension* extension = frame.extensions;
  while (extension != nullptr && extension->type != type) extension = extension->next;
  return extension;
}

}  // namespace

extern "C" void* TakesNative(const XLA_FFI_CallFrame* frame) {
  if (auto* metadata = const_cast<XLA_FFI_Extension*>(Find(*frame, kXlaFfiExtensionMetadata))) {
    auto* question = reinterpret_cast<XLA_FFI_MetadataExtension*>(metadata);
    question->metadata->api_version.major = 0;
    question->metadata->api_version.minor = 1;
    // Ours must be behind XLA's: others look at the first one only.
    if (metadata != frame->extensions || metadata->next == nullptr) return nullptr;
    if (metadata->next->type == kJfmExtensionCapabilities) {
      reinterpret_cast<JfmCapabilitiesExtension*>(metadata->next)->takes_native_buffers = 1;
    }
    return nullptr;
  }
  const bool native = Find(*frame, kJfmExtensionNativeBuffers) != nullptr;
  if (native) ++num_native_stages;
  if (frame->stage != XLA_FFI_EXECUTE) return nullptr;
  is_native = native;
  num_values = 0;
  for (const XLA_FFI_Values* list : {&frame->arguments, &frame->results}) {
    for (int64_t i = 0; i < list->size; ++i) {
      values[num_values++] = static_cast<XLA_FFI_Buffer*>(list->values[i])->data;
    }
  }
  return nullptr;
}

extern "C" int NativeLastCall(void** data, int64_t* count) {
  for (int64_t i = 0; i < num_values; ++i) data[i] = values[i];
  *count = num_values;
  return is_native;
}
extern "C" int NativeStages() { return num_native_stages; }
