// Strict decoding of an XLA FFI call frame: every buffer and attribute must be exactly
// what version 3 of the wire format says. Pure; knows no device.
#pragma once

#include "plugin/attention/host_problem.h"
#include "plugin/ffi/xla_ffi.h"
#include "plugin/status.h"

namespace jfm {

// The version of names, order and meaning of buffers and attributes; the Python
// package sends it along. The number in the target names is the same.
constexpr int64_t kWireVersion = 3;

// Buffers are dense and row-major. A dimension of an operand may be 1 where the call's is
// not, if it is a batch dimension or the table of tensors says so: it is shared then, with
// stride 0; of a gradient, summed.
Result<HostProblem> DecodeCallFrame(const XLA_FFI_CallFrame& frame, const Pass& pass);

}  // namespace jfm
