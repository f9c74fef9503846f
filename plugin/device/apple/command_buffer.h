// Dispatches as MTLCommandBuffers of one queue: one, or several where the work is long.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "plugin/device/apple/buffers.h"
#include "plugin/device/apple/objc.h"
#include "plugin/device/apple/pipeline_cache.h"
#include "plugin/device/device.h"

namespace jfm::apple {

// macOS draws the screen with the same GPU, and ends command buffers that keep it from that
// for seconds. This is half a second at the peak of the slowest GPU there is, that of an M1
// with 7 cores (2.3e12 operations per second), of which kernels reach a part. A dispatch is
// not divided here: its planner does that.
constexpr double kMaxWorkPerCommandBuffer = 1e12;

// Counts what is under way; completion handlers end it on threads of Metal's.
class Completion {
 public:
  void Start();
  void Finish() noexcept;
  void WaitForAll();

 private:
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
  Completion completion_;
};

}  // namespace jfm::apple
