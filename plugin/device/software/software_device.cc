#include "plugin/device/software/software_device.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "plugin/device/software/kernel_abi.h"
#include "plugin/device/software/thread_pool.h"
#include "plugin/device/software/threadgroup.h"
#include "plugin/host_cpu.h"

#ifdef JFM_CHECKER
#include "plugin/device/software/checker.h"
#endif

namespace jfm {
namespace {

// Some kernels never touch a buffer that they declare: it may stay unbound.
alignas(64) char unbound[4096];

#ifndef JFM_CHECKER

class SoftwareBuffer : public Buffer {
 public:
  SoftwareBuffer(void* data, size_t size_bytes, bool owned)
      : data_(static_cast<char*>(data)), size_bytes_(size_bytes), owned_(owned) {}
  ~SoftwareBuffer() override {
    if (owned_) std::free(data_);
  }
  size_t size_bytes() const override { return size_bytes_; }
  char* data() const { return data_; }

 private:
  char* data_;
  size_t size_bytes_;
  bool owned_;
};

#else

// The checker's buffers lie between red zones, so that an access past the end is seen:
// wrapped memory is copied in, and back when a command buffer that bound it is complete.
using SoftwareBuffer = CheckedBuffer;

#endif

class SoftwarePipeline : public Pipeline {
 public:
  const SoftwareKernel* kernel;
  int32_t constants[kMaxFunctionConstants];
};

// Runners keep their stacks between dispatches; there are as many as threads have worked
// at the same time.
class RunnerPool {
 public:
  std::unique_ptr<ThreadgroupRunner> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<ThreadgroupRunner>();
    std::unique_ptr<ThreadgroupRunner> runner = std::move(free_.back());
    free_.pop_back();
    return runner;
  }
  void Return(std::unique_ptr<ThreadgroupRunner> runner) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(runner));
  }
  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;  // protects free_
  std::vector<std::unique_ptr<ThreadgroupRunner>> free_;
};

RunnerPool& Runners() {
  static RunnerPool& pool = *new RunnerPool;
  return pool;
}

struct EncodedDispatch {
  KernelLaunch launch;
  std::vector<std::vector<char>> bytes;  // copies of BytesBinding data
  std::vector<BufferBinding> buffers;
};

Status RunDispatch(const EncodedDispatch& dispatch) {
  const KernelLaunch& launch = dispatch.launch;
  const Size3& grid = launch.threadgroups;
  std::mutex mutex;  // protects error
  std::string error;
  const auto run = [&](uint64_t index) {
    std::unique_ptr<ThreadgroupRunner> runner = Runners().Take();
#ifdef JFM_CHECKER
    runner->set_lane_order(Checker::Get().lane_order(), Checker::Get().seed());
#endif
    const Size3 position = {static_cast<uint32_t>(index % grid.x),
                            static_cast<uint32_t>(index / grid.x % grid.y),
                            static_cast<uint32_t>(index / grid.x / grid.y)};
    const std::string reason = runner->Run(launch, position);
    Runners().Return(std::move(runner));
    if (reason.empty()) return true;
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = reason;
    return false;
  };
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
#ifdef JFM_CHECKER
  Checker::Get().StartDispatch(dispatch.buffers, launch);
  for (const std::vector<char>& bytes : dispatch.bytes) {
    Checker::Get().AddConstants(bytes.data(), bytes.size());
  }
  for (uint64_t i = 0; i < count && run(i); ++i) {
  }
#else
  ParallelFor(count, run);
#endif
  return error.empty() ? Status() : Internal(error);
}

class SoftwareCommandBuffer : public CommandBuffer {
 public:
  Status Encode(const Dispatch& dispatch) override {
    const auto* pipeline = static_cast<const SoftwarePipeline*>(dispatch.pipeline);
    const Size3& threads = dispatch.threads_per_threadgroup;
    const std::string name = pipeline->kernel->host_name;
    const uint64_t num_threads = uint64_t{threads.x} * threads.y * threads.z;
    if (num_threads < 1 || num_threads > kMaxThreads) {
      return InvalidArgument(name + ": a threadgroup must have 1 to " +
                             std::to_string(kMaxThreads) + " threads, but got " +
                             std::to_string(num_threads) + ".");
    }
    EncodedDispatch encoded;
    encoded.launch.kernel = pipeline->kernel;
    std::memcpy(encoded.launch.constants, pipeline->constants, sizeof(pipeline->constants));
    for (uint64_t& address : encoded.launch.buffers) {
      address = reinterpret_cast<uint64_t>(unbound);
    }
    for (const BufferBinding& b : dispatch.buffers) {
      if (b.index >= MSL_MAX_BUFFERS || b.buffer == nullptr ||
          b.offset_bytes > b.buffer->size_bytes()) {
        return InvalidArgument(name + ": buffer " + std::to_string(b.index) +
                               " is missing, or its index or offset is out of range.");
      }
      const auto* buffer = static_cast<const SoftwareBuffer*>(b.buffer);
      encoded.launch.buffers[b.index] = reinterpret_cast<uint64_t>(buffer->data()) + b.offset_bytes;
    }
    encoded.buffers = dispatch.buffers;
    for (const BytesBinding& b : dispatch.bytes) {
      if (b.index >= MSL_MAX_BUFFERS) {
        return InvalidArgument(name + ": buffer index " + std::to_string(b.index) +
                               " is out of range.");
      }
      const char* data = static_cast<const char*>(b.data);
      encoded.bytes.emplace_back(data, data + b.size_bytes);
      encoded.launch.buffers[b.index] = reinterpret_cast<uint64_t>(encoded.bytes.back().data());
    }
    encoded.launch.threadgroups = dispatch.threadgroups;
    encoded.launch.threads_per_threadgroup = threads;
    dispatches_.push_back(std::move(encoded));
    return {};
  }

  // The work is done by Wait(), on its thread and the pool's: nothing is gained by starting
  // before someone waits, and a caller that is itself a pool thread cannot starve.
  Status Commit() override { return {}; }

  Status Wait() override {
#ifdef JFM_CHECKER
    std::lock_guard<std::mutex> lock(Checker::Get().mutex());
#endif
    Status status;
    for (const EncodedDispatch& dispatch : dispatches_) {
      status = RunDispatch(dispatch);
      if (!status.ok()) break;
    }
#ifdef JFM_CHECKER
    for (const EncodedDispatch& dispatch : dispatches_) {
      Checker::Get().FinishCommandBuffer(dispatch.buffers);
    }
#endif
    dispatches_.clear();
    return status;
  }

 private:
  std::vector<EncodedDispatch> dispatches_;
};

class SoftwareDeviceImpl : public Device {
 public:
  SoftwareDeviceImpl() {
    facts_.name = "software Metal device";
    facts_.num_cores = static_cast<uint32_t>(NumCpus());
    facts_.max_threadgroup_memory_bytes = kMaxThreadgroupBytes;
    facts_.max_threads_per_threadgroup = kMaxThreads;
  }

  const DeviceFacts& facts() const override { return facts_; }

  Result<const Pipeline*> GetPipeline(const std::string& kernel,
                                      const std::vector<FunctionConstant>& constants) override {
    std::vector<int32_t> values(kMaxFunctionConstants, 0);
    for (const FunctionConstant& c : constants) {
      if (c.index >= kMaxFunctionConstants) {
        return InvalidArgument(kernel + ": function constant " + std::to_string(c.index) +
                               " is out of range.");
      }
      values[c.index] = c.value;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<SoftwarePipeline>& pipeline = pipelines_[{kernel, values}];
    if (pipeline == nullptr) {
      const SoftwareKernel* found = FindKernel(kernel);
      if (found == nullptr) {
        pipelines_.erase({kernel, values});
        return Status(Code::kNotFound,
                      "the software Metal device has no kernel named '" + kernel + "'.");
      }
      pipeline = std::make_unique<SoftwarePipeline>();
      pipeline->kernel = found;
      std::memcpy(pipeline->constants, values.data(), sizeof(pipeline->constants));
    }
    return static_cast<const Pipeline*>(pipeline.get());
  }

  // malloc is the pool.
  Result<std::unique_ptr<Buffer>> AllocateScratch(size_t size_bytes) override {
    return Allocate(size_bytes);
  }

  Result<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) override {
#ifdef JFM_CHECKER
    return std::unique_ptr<Buffer>(std::make_unique<CheckedBuffer>(nullptr, size_bytes));
#else
    const size_t rounded = (size_bytes + 63) & ~size_t{63};
    void* data = std::aligned_alloc(64, rounded == 0 ? 64 : rounded);
    if (data == nullptr) {
      return Status(Code::kResourceExhausted,
                    "out of memory: a buffer of " + std::to_string(size_bytes) + " bytes.");
    }
    return std::unique_ptr<Buffer>(std::make_unique<SoftwareBuffer>(data, size_bytes, true));
#endif
  }

  Result<std::unique_ptr<Buffer>> WrapHostMemory(void* data, size_t size_bytes,
                                                 Access) override {
#ifdef JFM_CHECKER
    return std::unique_ptr<Buffer>(std::make_unique<CheckedBuffer>(data, size_bytes));
#else
    if (data == nullptr) data = unbound;  // of size 0: never touched
    return std::unique_ptr<Buffer>(std::make_unique<SoftwareBuffer>(data, size_bytes, false));
#endif
  }

  Result<std::unique_ptr<Buffer>> WrapNative(void*, size_t) override {
    return Unimplemented("the software Metal device has no native buffers.");
  }

  std::unique_ptr<CommandBuffer> NewCommandBuffer() override {
    return std::make_unique<SoftwareCommandBuffer>();
  }

  void SetCacheFolder(const std::string&) override {}  // pipelines are compiled already

  std::mutex& mutex() { return mutex_; }

 private:
  static const SoftwareKernel* FindKernel(const std::string& name) {
    for (size_t i = 0; i < kNumSoftwareKernels; ++i) {
      if (name == kSoftwareKernels[i].host_name) return &kSoftwareKernels[i];
    }
    return nullptr;
  }

  DeviceFacts facts_;
  std::mutex mutex_;  // protects pipelines_
  std::map<std::pair<std::string, std::vector<int32_t>>, std::unique_ptr<SoftwarePipeline>>
      pipelines_;
};

SoftwareDeviceImpl& TheDevice() {
  static SoftwareDeviceImpl& device = *new SoftwareDeviceImpl;
  return device;
}

}  // namespace

Device& SoftwareDevice() {
  // A fork() waits until no other thread holds a mutex of the device: its child has none of
  // these threads, and would wait for them for ever. The thread pool has its own answer.
  [[maybe_unused]] static const int registered = [] {
    const auto unlock = [] {
      Runners().mutex().unlock();
      TheDevice().mutex().unlock();
    };
    const auto lock = [] {
      TheDevice().mutex().lock();
      Runners().mutex().lock();
    };
    return pthread_atfork(lock, unlock, unlock);
  }();
  return TheDevice();
}

void SetSoftwareDeviceThreads(int num_threads) { SetNumThreads(num_threads); }

}  // namespace jfm
