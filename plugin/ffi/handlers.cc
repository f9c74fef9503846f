// The XLA FFI handlers: decode the call frame, run, report. One table of them, and the
// C symbols that the Python package registers with JAX.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "plugin/attention/host_problem.h"
#include "plugin/backends/backends.h"
#include "plugin/c_boundary.h"
#include "plugin/cpu/workers.h"
#include "plugin/ffi/call_frame.h"
#include "plugin/ffi/native_buffers.h"
#include "plugin/ffi/thread_pool.h"
#include "plugin/ffi/xla_ffi.h"

// X(symbol and target name, pass)
#define JFM_HANDLERS(X)                         \
  X(jax_flash_metal_forward_v3, kForwardPass)   \
  X(jax_flash_metal_backward_v3, kBackwardPass) \
  X(jax_flash_metal_gradient_v3, kGradientPass)

namespace jfm {
namespace {

XLA_FFI_Error* CreateError(const XLA_FFI_Api* api, const Status& status) {
  if (api == nullptr || api->error_create == nullptr) {
    // Not XLA. To return null would call an unwritten result a success.
    std::fprintf(stderr, "jax_flash_metal: no way to report: %s\n", status.message().c_str());
    std::abort();
  }
  XLA_FFI_ErrorCreateArgs args = {};
  args.struct_size = XLA_FFI_SIZE(XLA_FFI_ErrorCreateArgs, code);
  args.message = status.message().c_str();
  args.code = static_cast<int32_t>(status.code());
  return api->error_create(&args);
}

Status TooSmall(const char* what, size_t expected, size_t got) {
  return InvalidArgument(std::string(what) + " must have at least " + std::to_string(expected) +
                         " bytes, but got " + std::to_string(got) + ".");
}

// XLA's question before the first call.
Status FillMetadata(const XLA_FFI_MetadataExtension& extension) {
  constexpr size_t kExtensionSize = XLA_FFI_SIZE(XLA_FFI_MetadataExtension, metadata);
  if (extension.base.struct_size < kExtensionSize) {
    return TooSmall("the metadata extension", kExtensionSize, extension.base.struct_size);
  }
  XLA_FFI_Metadata* metadata = extension.metadata;
  if (metadata == nullptr) return InvalidArgument("the metadata is a null pointer.");
  constexpr size_t kMetadataSize = XLA_FFI_SIZE(XLA_FFI_Metadata, traits);
  if (metadata->struct_size < kMetadataSize) {
    return TooSmall("XLA_FFI_Metadata", kMetadataSize, metadata->struct_size);
  }
  metadata->api_version.struct_size = XLA_FFI_SIZE(XLA_FFI_Version, minor);
  metadata->api_version.extensions = nullptr;
  metadata->api_version.major = kXlaFfiApiMajor;
  metadata->api_version.minor = kXlaFfiApiMinor;
  metadata->traits = 0;
  return {};
}

// Our PJRT plugin's question, behind XLA's.
Status FillCapabilities(JfmCapabilitiesExtension& capabilities) {
  constexpr size_t kSize = XLA_FFI_SIZE(JfmCapabilitiesExtension, takes_native_buffers);
  if (capabilities.base.struct_size < kSize) {
    return TooSmall("the capabilities extension", kSize, capabilities.base.struct_size);
  }
  capabilities.takes_native_buffers = 1;
  return {};
}

Status HandleFrame(const XLA_FFI_CallFrame& frame, const Pass& pass) {
  constexpr size_t kFrameSize = XLA_FFI_SIZE(XLA_FFI_CallFrame, attributes);
  if (frame.struct_size < kFrameSize) {
    return TooSmall("XLA_FFI_CallFrame", kFrameSize, frame.struct_size);
  }
  bool is_question = false;
  bool are_native = false;
  for (XLA_FFI_Extension* extension = frame.extensions; extension != nullptr;
       extension = extension->next) {
    Status status;
    switch (extension->type) {
      case kXlaFfiExtensionMetadata:
        is_question = true;
        status = FillMetadata(*reinterpret_cast<XLA_FFI_MetadataExtension*>(extension));
        break;
      case kJfmExtensionCapabilities:
        status = FillCapabilities(*reinterpret_cast<JfmCapabilitiesExtension*>(extension));
        break;
      case kJfmExtensionNativeBuffers:
        are_native = true;
        break;
      default:
        break;  // for other handlers than ours
    }
    if (!status.ok()) return status;
  }
  if (is_question) return {};
  switch (frame.stage) {
    case XLA_FFI_INSTANTIATE:
    case XLA_FFI_PREPARE:
    case XLA_FFI_INITIALIZE:
      return {};  // no state: nothing to do before execution
    case XLA_FFI_EXECUTE:
      break;
    default:
      return Unimplemented("execution stage " + std::to_string(frame.stage) +
                           " is not known; the last one known is 3 (execute).");
  }
  Result<HostProblem> host = DecodeCallFrame(frame, pass);
  if (!host.ok()) return host.status();
  for (HostMemory& memory : host->memory) memory.is_native = are_native;
  XlaThreadPool pool(frame);
  cpu::Workers workers(&pool, cpu::NumThreads());
  return RunOnHost(pass, std::move(*host), workers);
}

XLA_FFI_Error* Handle(const char* target, const Pass& pass,
                      const XLA_FFI_CallFrame& frame) noexcept {
  const Status status = WithoutExceptions([&]() -> Status {
    Status result = HandleFrame(frame, pass);
    if (result.ok()) return result;
    return {result.code(), std::string(target) + ": " + result.message()};
  });
  return status.ok() ? nullptr : CreateError(frame.api, status);
}

}  // namespace
}  // namespace jfm

#define JFM_DEFINE_HANDLER(symbol, pass)                               \
  extern "C" JFM_EXPORT void* symbol(const XLA_FFI_CallFrame* frame) { \
    return jfm::Handle(#symbol, jfm::pass, *frame);                    \
  }
JFM_HANDLERS(JFM_DEFINE_HANDLER)
