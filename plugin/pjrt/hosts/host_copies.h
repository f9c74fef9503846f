// Copies between a host's buffers and memory of ours.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "plugin/pjrt/buffers.h"
#include "plugin/status.h"

namespace jfm::pjrt {

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
using StagingMemory = std::unique_ptr<void, FreeMemory>;
// Host memory as aligned as XLA's own; never null, not for an empty array either.
Result<StagingMemory> NewStaging(int64_t size_bytes);

// The content of a buffer that is written, in row-major order if `layout` says so, else in
// the buffer's own. Waits for the copy.
Result<StagingMemory> CopyFromHost(const Host& host, PJRT_Buffer* buffer, int64_t size_bytes,
                                   PJRT_MemoryLayout* layout = nullptr);

// A dense row-major array as a new buffer; `data` is free again when this returns.
Result<PJRT_Buffer*> CopyToHost(const Device& device, const void* data, int32_t buffer_type,
                                const int64_t* dims, size_t num_dims);

}  // namespace jfm::pjrt
