// Dispatches as MTLCommandBuffers of one queue: one, or several where the work is long.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "plugin/device/apple/buffers.h"
#include "plugin/device/apple/objc.h"
#include "plugin/device/apple/pipeline_cache.h"
#include "plugin/device/device.h"

namespace jfm::apple {

// Counts what is under way; completion handlers end it on threads of Metal's. Shared with
// them: whoever waited may be gone before the last of them has let go of the mutex.
class Completion : public std::enable_shared_from_this<Completion> {
 public:
  // For one command buffer, which must be committed: it is under way from now on, until the
  // handler is called, once. The handler holds this object till then.
  Block NewHandler();
  void WaitForAll();

 private:
  static void OnCompleted(Block* block, id commands) noexcept;

  std::mutex mutex_;  // protects running_
  std::condition_variable changed_;
  int running_ = 0;
};

class AppleCommandBuffer : public CommandBuffer {
 public:
  // Both outlive it.
  AppleCommandBuffer(id queue, const DeviceFacts& facts) : queue_(queue), facts_(facts) {}
  // Waits for what was committed.
  ~AppleCommandBuffer() override;
  Status Encode(const Dispatch& dispatch) override;
  Status Commit() override;
  Status Wait() override;

 private:
  struct Part {
    Ref commands;                      // id<MTLCommandBuffer>
    std::vector<std::string> kernels;  // each once, in order
  };

  Status Check(const Dispatch& dispatch) const;
  Status Begin();
  Status Outcome(const Part& part) const;

  const id queue_;
  const DeviceFacts& facts_;
  std::vector<Part> parts_;  // the last one is being encoded while encoder_ is there
  Ref encoder_;              // id<MTLComputeCommandEncoder>
  double work_ = 0;          // of the part that is being encoded
  std::set<const AppleBuffer*> buffers_;
  const std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
};

}  // namespace jfm::apple
