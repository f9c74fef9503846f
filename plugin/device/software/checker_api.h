// What the checker build of the library exports for tests, through ctypes. The fast build
// has none of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugin/c_boundary.h"

extern "C" {

// In which order the lanes of a threadgroup run: 0 forward, 1 reverse, 2 random by `seed`.
JFM_EXPORT void jfm_software_set_lane_order(int order, uint32_t seed);

// Findings since the last clear, each kind and place once, as lines of
//   <kind>\t<kernel>\t<where>\t<code offset in the library, hexadecimal>\t<details>
// Writes at most `size` bytes with a final 0; returns the length of the whole text.
JFM_EXPORT size_t jfm_software_reports(char* text, size_t size);

// What the dispatches since the last clear did, in order, each a line of JSON: the members of
// DispatchCounts (checker.h); "buffers" are [bytes read, written] by buffer index.
JFM_EXPORT size_t jfm_software_counts(char* text, size_t size);

// The barriers that kernels passed since the last clear, each place in the source of a kernel
// a line of JSON: the kernel, "file", "line", "scope", "executions" and "is_needed", whether
// some pair of accesses was ordered by this place alone.
JFM_EXPORT size_t jfm_software_barriers(char* text, size_t size);

JFM_EXPORT void jfm_software_clear(void);

// The next command buffer that wraps this host memory takes it for uninitialised: reading
// it before it is written is a finding. For outputs.
JFM_EXPORT void jfm_software_mark_uninitialized(const void* data, size_t size_bytes);

}  // extern "C"
