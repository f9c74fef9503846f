// What a plan depends on beside the problem: the GPU, measured choices and limits. As one value,
// so that the planner reads no globals; the process-wide settings that the value comes from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "plugin/attention/choices.h"
#include "plugin/device/device.h"

namespace jfm {

// Of the scratch for dS: enough for two heads of 4096 x 4096 in 16 bits, little beside the memory
// of any Mac. A GPU of many cores wants more, or a chunk would not fill it; up to a share of its
// memory it gets that. The bits do not depend on it.
constexpr int64_t kScoreGradientLimit = int64_t{64} << 20;
constexpr int64_t kScoreGradientBytesPerCore = int64_t{24} << 20;
constexpr int64_t kScoreGradientShare = 32;  // 1/32 of the memory

struct PlanContext {
  int gpu_family = 0;                                  // of "Apple9": 9; 0: not known
  std::shared_ptr<const Choices> choices;              // null: none
  int64_t score_gradient_limit = kScoreGradientLimit;  // bytes
  double max_launch_work = kMaxWorkAtOnce;  // of a launch, about; floating-point operations
};

// As set for the process; family and limit are those of a device unless they are set.
PlanContext CurrentContext(const DeviceFacts& facts);

// From now on, for the whole process; from any thread.
void SetChoices(Choices choices);
void SetGpuFamily(int family);              // below 0: as the device says
void SetScoreGradientLimit(int64_t bytes);  // 0: the default
void SetMaxLaunchWork(double operations);   // 0: the default

// Whether SetGpuFamily has set one, so that no device needs to be asked.
bool HasSetGpuFamily();

}  // namespace jfm
