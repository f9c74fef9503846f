// Kernels with their function constants, compiled by Metal at first use and kept: in memory,
// and between processes in the folder that was set.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plugin/device/apple/objc.h"
#include "plugin/device/device.h"

namespace jfm::apple {

struct ApplePipeline : Pipeline {
  std::string kernel;
  Ref state;  // id<MTLComputePipelineState>
  uint64_t max_threads = 0;
};

class PipelineCache {
 public:
  // Both outlive the cache.
  PipelineCache(id device, const DeviceFacts& facts) : device_(device), facts_(facts) {}

  Result<const Pipeline*> Get(const std::string& kernel,
                              const std::vector<FunctionConstant>& constants);
  void SetFolder(const std::string& folder);

 private:
  using Key = std::pair<std::string, std::string>;  // kernel, constants as text
  struct Entry {
    std::mutex mutex;  // held while its pipeline is made, by one thread for all
    std::unique_ptr<ApplePipeline> pipeline;
  };

  Result<std::unique_ptr<ApplePipeline>> Make(const Key& key,
                                              const std::vector<FunctionConstant>& constants);
  std::string ArchivePath(const Key& key);

  const id device_;
  const DeviceFacts& facts_;
  std::mutex mutex_;  // protects entries_ and folder_, not what an entry holds
  std::map<Key, Entry> entries_;
  std::string folder_;
};

}  // namespace jfm::apple
