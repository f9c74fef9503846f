// Strict decoding of an XLA FFI call frame: every buffer and attribute must be exactly
// what version 1 of the wire format says. Pure; knows no device.
#pragma once

#include "plugin/attention/host_problem.h"
#include "plugin/ffi/xla_ffi.h"
#include "plugin/status.h"

namespace jfm {

// The version of names, order and meaning of buffers and attributes; the Python
// package sends it along. The number in the target names is the same.
constexpr int64_t kWireVersion = 1;

// Buffers are dense and row-major. A batch dimension of an operand may be 1 where the
// call's is not: it is shared then, with stride 0.
Result<HostProblem> DecodeCallFrame(const XLA_FFI_CallFrame& frame, const Pass& pass);

}  // namespace jfm
