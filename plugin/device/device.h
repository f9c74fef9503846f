// The device interface: what the layers above need of Metal, and no more. Implemented
// by device/software (any CPU) and, on a Mac, by device/apple. Knows nothing of
// attention or JAX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugin/status.h"

namespace jfm {

struct Size3 {
  uint32_t x = 1, y = 1, z = 1;
};

// Memory that kernels can read and write. Destroying a wrapped buffer leaves the
// memory alone; destroying an allocated one frees it.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual size_t size_bytes() const = 0;
};

// A value for one [[function_constant(index)]]. bool constants take 0 or 1.
struct FunctionConstant {
  uint16_t index;
  enum class Type : uint8_t { kBool, kInt } type;
  int32_t value;
};

// A kernel with its function constants fixed. Owned and cached by the device.
class Pipeline {
 public:
  virtual ~Pipeline() = default;
};

struct BufferBinding {
  uint32_t index;         // [[buffer(index)]]
  const Buffer* buffer;
  uint64_t offset_bytes;
};

// A small constant block copied at encode time (Metal's setBytes).
struct BytesBinding {
  uint32_t index;
  const void* data;
  size_t size_bytes;
};

struct Dispatch {
  const Pipeline* pipeline;
  std::vector<BufferBinding> buffers;
  std::vector<BytesBinding> bytes;
  Size3 threadgroups;               // grid, in threadgroups
  Size3 threads_per_threadgroup;
};

// Dispatches run in the order of encoding, each after the one before is complete.
// Buffers must outlive Wait().
class CommandBuffer {
 public:
  virtual ~CommandBuffer() = default;
  virtual Status Encode(const Dispatch& dispatch) = 0;
  virtual Status Commit() = 0;
  virtual Status Wait() = 0;  // the first error of the whole command buffer
};

struct DeviceFacts {
  std::string name;
  uint32_t max_threadgroup_memory_bytes;
  uint32_t max_threads_per_threadgroup;
  uint32_t num_cores;  // GPU cores, or CPU threads of the software device
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceFacts& facts() const = 0;
  // `kernel` is the host_name of the instantiation. The pipeline lives as long as the device.
  virtual Result<const Pipeline*> GetPipeline(const std::string& kernel,
                                              const std::vector<FunctionConstant>& constants) = 0;
  virtual Result<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) = 0;
  virtual Result<std::unique_ptr<Buffer>> WrapHostMemory(void* data, size_t size_bytes) = 0;
  virtual std::unique_ptr<CommandBuffer> NewCommandBuffer() = 0;
};

}  // namespace jfm
