#include "plugin/attention/plan_context.h"

#include <algorithm>
#include <cctype>
#include <mutex>
#include <utility>

namespace jfm {
namespace {

std::mutex mutex;  // protects what follows
PlanContext& settings = *new PlanContext;
int set_family = -1;
int64_t set_limit = 0;

// The number of "Apple9".
int FamilyNumber(const std::string& family) {
  const std::string prefix = "Apple";
  if (family.compare(0, prefix.size(), prefix) != 0) return 0;
  int number = 0;
  for (size_t i = prefix.size(); i < family.size() && number < 1000; ++i) {
    if (std::isdigit(static_cast<unsigned char>(family[i])) == 0) return 0;
    number = 10 * number + (family[i] - '0');
  }
  return number;
}

int64_t ScoreGradientLimit(const DeviceFacts& facts) {
  const int64_t wanted = facts.num_cores * kScoreGradientBytesPerCore;
  const int64_t share = static_cast<int64_t>(facts.memory_limit_bytes) / kScoreGradientShare;
  return std::max(kScoreGradientLimit, std::min(wanted, share));
}

}  // namespace

PlanContext CurrentContext(const DeviceFacts& facts) {
  std::lock_guard<std::mutex> lock(mutex);
  PlanContext context = settings;
  context.gpu_family = set_family >= 0 ? set_family : FamilyNumber(facts.family);
  context.score_gradient_limit = set_limit > 0 ? set_limit : ScoreGradientLimit(facts);
  return context;
}

void SetChoices(Choices choices) {
  auto shared = std::make_shared<const Choices>(std::move(choices));
  std::lock_guard<std::mutex> lock(mutex);
  settings.choices = std::move(shared);
}

void SetGpuFamily(int family) {
  std::lock_guard<std::mutex> lock(mutex);
  set_family = family;
}

void SetScoreGradientLimit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  set_limit = bytes;
}

void SetMaxLaunchWork(double operations) {
  std::lock_guard<std::mutex> lock(mutex);
  settings.max_launch_work = operations > 0 ? operations : kMaxWorkAtOnce;
}

bool HasSetGpuFamily() {
  std::lock_guard<std::mutex> lock(mutex);
  return set_family >= 0;
}

}  // namespace jfm
