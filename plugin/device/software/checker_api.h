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

// Statistics since the last clear, as lines of
//   <kernel>\t<dispatches>\t<threadgroups>\t<threadgroup memory bytes>\t<fiber switches>
//   \t<matrix products>\t<checked accesses>
JFM_EXPORT size_t jfm_software_statistics(char* text, size_t size);

JFM_EXPORT void jfm_software_clear(void);

// The next command buffer that wraps this host memory takes it for uninitialised: reading
// it before it is written is a finding. For outputs.
JFM_EXPORT void jfm_software_mark_uninitialized(const void* data, size_t size_bytes);

}  // extern "C"
