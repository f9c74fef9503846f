#include "plugin/attention/plan_json.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plugin/attention/choices.h"

namespace jfm {
namespace {

std::string Quoted(const std::string& text) { return '"' + text + '"'; }  // of plain characters

template <class Items, class Write>
std::string List(const Items& items, Write write) {
  std::vector<std::string> parts;
  for (const auto& item : items) parts.push_back(write(item));
  return "[" + Join(parts) + "]";
}

std::string Hex(const AttentionParams& params) {
  constexpr char kDigits[] = "0123456789abcdef";
  const auto* bytes = reinterpret_cast<const unsigned char*>(&params);
  std::string text;
  text.reserve(2 * sizeof(params));
  for (size_t i = 0; i < sizeof(params); ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

std::string LaunchJson(const Launch& launch) {
  const Size3& grid = launch.threadgroups;
  const int64_t work = static_cast<int64_t>(std::ceil(launch.work));
  const auto value = [](const FunctionConstant& constant) {
    return std::to_string(constant.value);
  };
  const std::string constants = List(launch.constants, value);
  const std::string buffers = List(launch.bindings, [&](const Binding& binding) {
    return "[" + std::to_string(binding.index) + ", " + Quoted(NameOf(binding.operand)) + ", " +
           std::to_string(launch.offsets[Index(binding.operand)]) + "]";
  });
  return "{\"kernel\": " + Quoted(launch.variant->host_name) + ", \"grid\": [" +
         std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z) +
         "], \"threads\": " + std::to_string(launch.threads_per_threadgroup.x) +
         ", \"work\": " + std::to_string(work) + ", \"constants\": " + constants +
         ", \"buffers\": " + buffers + ", \"params\": " + Quoted(Hex(launch.params)) + "}";
}

// More than LaunchJson makes of any launch: 2720 digits of parameters, at most 32 buffers and the
// constants, and a name.
constexpr size_t kMaxLaunchSize = 8192;
static_assert(2 * sizeof(AttentionParams) < kMaxLaunchSize / 2);

std::string Header(const AttentionProblem& problem, int gpu_family, const char* origin,
                   const char* form, const std::vector<std::string>& kernels,
                   size_t num_launches) {
  return "{\"class\": " + Quoted(ShapeClass(problem)) +
         ", \"family\": " + std::to_string(gpu_family) + ", \"origin\": " + Quoted(origin) +
         ", \"form\": " + Quoted(form) + ", \"kernels\": " + List(kernels, Quoted) +
         ", \"num_launches\": " + std::to_string(num_launches) + ", \"scratch_bytes\": {";
}

}  // namespace

PlanText DescribePlan(const AttentionProblem& problem, int gpu_family, const Plan& plan,
                      size_t room) {
  std::vector<std::string> kernels;  // few, however many launches there are
  for (const Launch& launch : plan.launches) {
    const std::string name = launch.variant->host_name;
    if (std::find(kernels.begin(), kernels.end(), name) == kernels.end()) kernels.push_back(name);
  }
  std::vector<std::string> scratch;
  for (size_t i = 0; i < kNumScratch; ++i) {
    scratch.push_back(Quoted(kScratchNames[i]) + ": " + std::to_string(plan.scratch_bytes[i]));
  }
  const std::string header =
      Header(problem, gpu_family, plan.is_measured ? "measured" : "default", Name(plan.form),
             kernels, plan.launches.size()) +
      Join(scratch) + "}";
  const size_t needed = header.size() + 32 + plan.launches.size() * kMaxLaunchSize;
  // Not even written down where it cannot fit: a long call has many thousand launches.
  if (2 * sizeof(AttentionParams) * plan.launches.size() < room) {
    PlanText whole = {header + ", \"launches\": " + List(plan.launches, LaunchJson) + "}\n"};
    if (whole.json.size() < room) return whole;
  }
  return {header + ", \"needed\": " + std::to_string(needed) + "}\n", needed};
}

PlanText DescribeKernel(const AttentionProblem& problem, const std::string& kernel) {
  return {Header(problem, 0, "default", "", {kernel}, 1) +
          "}, \"launches\": [{\"kernel\": " + Quoted(kernel) +
          ", \"grid\": [1, 1, 1], \"threads\": 1, \"work\": 0, \"constants\": [], "
          "\"buffers\": [], \"params\": \"\"}]}\n"};
}

}  // namespace jfm
