// Two extensions of ours to XLA's call frame, by which our PJRT plugin gives handlers the
// objects of the device, id<MTLBuffer>, where the host plugin's buffers are such objects and
// have no address (jax-metal). Any handler may take part; one that does not gets copies in
// host memory.
#pragma once

#include "plugin/ffi/xla_ffi.h"

extern "C" {

// Behind XLA's metadata extension, in the question before the first call. A handler that
// understands kJfmExtensionNativeBuffers sets `takes_native_buffers` to 1.
constexpr int32_t kJfmExtensionCapabilities = 0x4a464d01;
struct JfmCapabilitiesExtension {
  XLA_FFI_Extension base;
  int32_t takes_native_buffers;
};

// In the frames of a call, at every stage that has buffers, to handlers that said so: the
// `data` of every operand and result is a borrowed id<MTLBuffer>, used from offset 0; null for
// empty arrays.
// Everything that wrote the operands is complete, and the results must be when the handler
// returns.
constexpr int32_t kJfmExtensionNativeBuffers = 0x4a464d02;

}  // extern "C"
