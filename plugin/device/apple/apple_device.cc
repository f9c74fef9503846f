// The device: its facts, and the parts that do the work.
#include "plugin/device/apple/apple_device.h"

#include <string>
#include <utility>

#include "plugin/device/apple/buffers.h"
#include "plugin/device/apple/command_buffer.h"
#include "plugin/device/apple/constants.h"
#include "plugin/device/apple/objc.h"
#include "plugin/device/apple/pipeline_cache.h"
#include "plugin/device/apple/selectors.h"

namespace jfm {
namespace apple {
namespace {

// Of every GPU from Apple7 on. Asking the device for it would return a struct.
constexpr uint32_t kMaxThreadsPerThreadgroup = 1024;

// Newest first. A GPU supports all families before its own.
constexpr struct {
  NSUInteger value;
  const char* name;
} kFamilies[] = {{constants::kFamilyApple10, "Apple10"},
                 {constants::kFamilyApple9, "Apple9"},
                 {constants::kFamilyApple8, "Apple8"},
                 {constants::kFamilyApple7, "Apple7"}};

// Metal does not tell; the GPU's driver does. 0: not known.
uint32_t NumCores() {
  if (!runtime.has_iokit) return 0;
  // Apple silicon has one GPU. The call consumes the dictionary.
  const unsigned int gpu =
      runtime.io_get_matching_service(0, runtime.io_service_matching("AGXAccelerator"));
  if (gpu == 0) return 0;
  const Ref count =
      Ref::Adopt(runtime.io_create_property(gpu, String("gpu-core-count"), nullptr, 0));
  runtime.io_object_release(gpu);
  // Not worth an exception if a driver tells it in another way than by an NSNumber.
  if (!count || !send::respondsToSelector(count.get(), send::integerValue.selector())) return 0;
  return static_cast<uint32_t>(send::integerValue(count.get()));
}

DeviceFacts ReadFacts(id device) {
  DeviceFacts facts;
  facts.name = Text(send::name(device));
  for (const auto& family : kFamilies) {
    if (send::supportsFamily(device, static_cast<NSInteger>(family.value))) {
      facts.family = family.name;
      break;
    }
  }
  const id process = send::processInfo(classes::NSProcessInfo);
  facts.system = "macOS " + Text(send::operatingSystemVersionString(process));
  facts.max_threadgroup_memory_bytes =
      static_cast<uint32_t>(send::maxThreadgroupMemoryLength(device));
  facts.max_threads_per_threadgroup = kMaxThreadsPerThreadgroup;
  facts.max_buffer_bytes = send::maxBufferLength(device);
  facts.memory_limit_bytes = send::recommendedMaxWorkingSetSize(device);
  facts.has_unified_memory = send::hasUnifiedMemory(device);
  facts.num_cores = NumCores();
  return facts;
}

class Implementation : public Device {
 public:
  Implementation(Ref device, Ref queue, DeviceFacts facts)
      : device_(std::move(device)),
        queue_(std::move(queue)),
        facts_(std::move(facts)),
        allocator_(device_.get(), facts_),
        pipelines_(device_.get(), facts_) {}

  const DeviceFacts& facts() const override { return facts_; }
  Result<const Pipeline*> GetPipeline(const std::string& kernel,
                                      const std::vector<FunctionConstant>& constants) override {
    return pipelines_.Get(kernel, constants);
  }
  Result<std::unique_ptr<Buffer>> AllocateScratch(size_t size_bytes) override {
    return allocator_.Scratch(size_bytes);
  }
  Result<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) override {
    return allocator_.Private(size_bytes);
  }
  Result<std::unique_ptr<Buffer>> WrapHostMemory(void* data, size_t size_bytes,
                                                 Access access) override {
    return allocator_.WrapHost(data, size_bytes, access);
  }
  Result<std::unique_ptr<Buffer>> WrapNative(void* native, size_t size_bytes) override {
    return allocator_.WrapNative(static_cast<id>(native), size_bytes);
  }
  std::unique_ptr<CommandBuffer> NewCommandBuffer() override {
    return std::make_unique<AppleCommandBuffer>(queue_.get(), facts_);
  }
  void SetCacheFolder(const std::string& folder) override { pipelines_.SetFolder(folder); }

 private:
  const Ref device_, queue_;
  const DeviceFacts facts_;
  Allocator allocator_;
  PipelineCache pipelines_;
};

}  // namespace
}  // namespace apple

Result<std::unique_ptr<Device>> OpenAppleDevice() {
  using namespace apple;
  if (const Status& status = OpenRuntime(); !status.ok()) return status;
  Pool pool;
  Ref device = Ref::Adopt(runtime.create_system_default_device());
  if (!device) {
    return Status(Code::kNotFound,
                  "no Metal device: the system gives this process no GPU, as in some virtual "
                  "machines and in sessions without a login.");
  }
  DeviceFacts facts = ReadFacts(device.get());
  if (facts.family.empty()) {
    return Unimplemented("the kernels need a GPU of the family Apple7 (M1) or newer, which " +
                         facts.name + " is not.");
  }
  Ref queue = Ref::Adopt(send::newCommandQueue(device.get()));
  if (!queue) return Internal(facts.name + " gives no command queue.");
  return std::unique_ptr<Device>(
      std::make_unique<Implementation>(std::move(device), std::move(queue), std::move(facts)));
}

Result<Device*> AppleDevice() {
  static const Result<std::unique_ptr<Device>>& opened =
      *new Result<std::unique_ptr<Device>>(OpenAppleDevice());
  if (!opened.ok()) return opened.status();
  return (*opened).get();
}

}  // namespace jfm
