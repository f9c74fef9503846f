// One dispatch of any kernel through the Device interface, for ctypes. Test code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plugin/c_boundary.h"
#include "plugin/device/software/software_device.h"

namespace jfm {
namespace {

struct BoundArray {
  uint32_t index;
  void* data;
  size_t size_bytes;
};

struct Launch {
  const char* kernel;
  const FunctionConstant* constants;
  size_t num_constants;
  const BoundArray* buffers;
  size_t num_buffers;
  const BoundArray* bytes;
  size_t num_bytes;
  Size3 threadgroups, threads;
  int32_t repeats;  // dispatches, in one command buffer
};

Status Run(const Launch& launch) {
  Device& device = SoftwareDevice();
  const std::vector<FunctionConstant> constants(launch.constants,
                                                launch.constants + launch.num_constants);
  Result<const Pipeline*> pipeline = device.GetPipeline(launch.kernel, constants);
  if (!pipeline.ok()) return pipeline.status();
  Dispatch dispatch;
  dispatch.pipeline = *pipeline;
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (size_t i = 0; i < launch.num_buffers; ++i) {
    const BoundArray& array = launch.buffers[i];
    Result<std::unique_ptr<Buffer>> buffer =
        device.WrapHostMemory(array.data, array.size_bytes, Access::kResult);
    if (!buffer.ok()) return buffer.status();
    dispatch.buffers.push_back({array.index, buffer->get(), 0});
    buffers.push_back(std::move(*buffer));
  }
  for (size_t i = 0; i < launch.num_bytes; ++i) {
    const BoundArray& array = launch.bytes[i];
    dispatch.bytes.push_back({array.index, array.data, array.size_bytes});
  }
  dispatch.threadgroups = launch.threadgroups;
  dispatch.threads_per_threadgroup = launch.threads;
  std::unique_ptr<CommandBuffer> commands = device.NewCommandBuffer();
  for (int32_t i = 0; i < launch.repeats; ++i) {
    if (Status status = commands->Encode(dispatch); !status.ok()) return status;
  }
  if (Status status = commands->Commit(); !status.ok()) return status;
  return commands->Wait();
}

}  // namespace
}  // namespace jfm

extern "C" JFM_EXPORT int jfm_test_run(const void* launch, char* message, size_t size) {
  const jfm::Status status =
      jfm::WithoutExceptions([&] { return jfm::Run(*static_cast<const jfm::Launch*>(launch)); });
  const size_t length = std::min(status.message().size(), size - 1);
  std::memcpy(message, status.message().data(), length);
  message[length] = '\0';
  return static_cast<int>(status.code());
}

extern "C" JFM_EXPORT void jfm_test_set_threads(int num_threads) {
  jfm::SetSoftwareDeviceThreads(num_threads);
}
