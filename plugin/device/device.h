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
  // The device's own object for it, borrowed: an id<MTLBuffer>, of which this is the memory
  // from offset 0 on. Null where there is none.
  virtual void* native() const { return nullptr; }
};

// What kernels do with wrapped host memory. A result's content is undefined before.
enum class Access : uint8_t { kOperand, kResult };

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
  // Floating-point operations, estimated: a device that must not be busy for long at a time
  // sees from it where to begin another command buffer of its own.
  double work = 0;
};

// What a GPU should do at a time, as one dispatch and as one command buffer: it draws the
// screen too, and the system ends what takes seconds. 1e11 operations are 0.04 s at the peak
// of the slowest chip, the 7-core M1 (2.3 TFLOP/s), and 0.3 s at 15 % of it; beside that, one
// more dispatch or command buffer costs nothing.
constexpr double kMaxWorkAtOnce = 1e11;

// Dispatches run in the order of encoding, each after the one before is complete.
// Buffers must outlive Wait(), after which the results are in wrapped host memory.
class CommandBuffer {
 public:
  virtual ~CommandBuffer() = default;
  virtual Status Encode(const Dispatch& dispatch) = 0;
  virtual Status Commit() = 0;
  virtual Status Wait() = 0;  // the first error of the whole command buffer
};

struct DeviceFacts {
  std::string name;     // "Apple M4 Pro"
  std::string family;   // the newest GPU family that it supports, "Apple9"; empty: not known
  std::string system;   // the operating system with its build, a part of cache keys
  uint32_t num_cores = 0;  // GPU cores, or CPU threads of the software device; 0: not known
  uint32_t max_threadgroup_memory_bytes = 0;
  uint32_t max_threads_per_threadgroup = 0;
  uint64_t max_buffer_bytes = 0;    // of one buffer; 0: not known
  uint64_t memory_limit_bytes = 0;  // of all together, as the system recommends; 0: not known
  bool has_unified_memory = true;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceFacts& facts() const = 0;
  // `kernel` is the host_name of the instantiation. The pipeline lives as long as the device.
  virtual Result<const Pipeline*> GetPipeline(const std::string& kernel,
                                              const std::vector<FunctionConstant>& constants) = 0;
  // Memory for the device's own use between kernels of a command buffer; from a pool.
  virtual Result<std::unique_ptr<Buffer>> AllocateScratch(size_t size_bytes) = 0;
  // Memory that may be given to others by its native(); never used again for anything else.
  virtual Result<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) = 0;
  virtual Result<std::unique_ptr<Buffer>> WrapHostMemory(void* data, size_t size_bytes,
                                                         Access access) = 0;
  // Somebody else's native object (see Buffer), retained as long as the buffer lives.
  virtual Result<std::unique_ptr<Buffer>> WrapNative(void* native, size_t size_bytes) = 0;
  virtual std::unique_ptr<CommandBuffer> NewCommandBuffer() = 0;
  // Where compiled pipelines may be kept between processes; none until it is set.
  virtual void SetCacheFolder(const std::string& folder) = 0;
};

}  // namespace jfm
