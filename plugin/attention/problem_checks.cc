#include "plugin/attention/problem_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <utility>

#include "plugin/attention/tensors.h"

namespace jfm {
namespace {

constexpr int64_t kMaxHeadDim = 256;

int32_t ClampToInt32(int64_t x) {
  return static_cast<int32_t>(std::clamp<int64_t>(x, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}

// A limit that 32 bits cannot hold is farther than any key.
int32_t WindowLimit(int64_t limit) {
  return limit > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(limit);
}

// "a", "b" and "c" of a group of operands must be given together.
Status CheckTogether(const AttentionProblem& p, std::initializer_list<Operand> group) {
  std::vector<std::string> names, given;
  for (Operand operand : group) {
    const size_t tensor = Index(operand);
    names.push_back(kTensors[tensor].name);
    if (IsGiven(tensor, p)) given.push_back(names.back());
  }
  if (given.empty() || given.size() == names.size()) return {};
  return InvalidArgument(Join(names) + " must be given together, but got only " + Join(given) +
                         ".");
}

std::string Text(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", x);
  return text;
}

// More than any machine computes, and so little that 64 bits can count what a plan makes of it:
// at most 2^10 times this, bytes of scratch.
constexpr double kMaxScores = 0x1p52;

Status CheckProduct(const AttentionProblem& p) {
  double scores = 1;
  const auto multiply = [&scores](int64_t size) {  // 0 does not hide what else is too large
    scores *= static_cast<double>(std::max<int64_t>(size, 1));
  };
  for (int64_t size : p.batch_sizes) multiply(size);
  for (int64_t size : {p.num_heads, p.q_len, p.kv_len}) multiply(size);
  if (scores <= kMaxScores) return {};
  return InvalidArgument("the batch sizes, num_heads, q_len and kv_len must have a product of at "
                         "most 2^52, but got batch sizes [" + ListText(p.batch_sizes) +
                         "], num_heads=" + std::to_string(p.num_heads) +
                         ", q_len=" + std::to_string(p.q_len) +
                         " and kv_len=" + std::to_string(p.kv_len) + ".");
}

Status CheckOptions(const AttentionProblem& p) {
  const std::pair<const char*, int64_t> limits[] = {{"window_left", p.window_left},
                                                    {"window_right", p.window_right}};
  for (const auto& [name, limit] : limits) {
    if (limit >= -1) continue;
    return InvalidArgument(std::string(name) + " must be at least -1 (no limit), but got " +
                           std::to_string(limit) + ".");
  }
  if (!std::isfinite(p.logits_soft_cap) || p.logits_soft_cap < 0) {
    return InvalidArgument("logits_soft_cap must be finite and at least 0 (none), but got " +
                           Text(p.logits_soft_cap) + ".");
  }
  for (Status status :
       {CheckTogether(p, {Operand::kQSegmentIds, Operand::kKvSegmentIds}),
        CheckTogether(p, {Operand::kDropoutKey, Operand::kDropoutBatchIndices,
                          Operand::kDropoutHeadIndices})}) {
    if (!status.ok()) return status;
  }
  const double rate = p.dropout_rate;
  if (p.dropout_key.is_given && !(rate > 0 && rate < 1)) {
    return InvalidArgument("dropout_rate must be above 0 and below 1 with dropout operands, but "
                           "got " + Text(rate) + ".");
  }
  if (!p.dropout_key.is_given && rate != 0) {
    return InvalidArgument("dropout_rate must be 0 without dropout operands, but got " +
                           Text(rate) + ".");
  }
  return {};
}

}  // namespace

Status CheckProblem(const Pass& pass, const AttentionProblem& p) {
  for (const SizeSpec& spec : kSizes) {
    const int64_t size = p.*spec.size;
    if (size < spec.min) {
      return InvalidArgument(std::string(spec.name) + " must be at least " +
                             std::to_string(spec.min) + ", but got " + std::to_string(size) + ".");
    }
  }
  for (size_t i = 0; i < p.batch_sizes.size(); ++i) {
    if (p.batch_sizes[i] < 0) {
      return InvalidArgument("batch size " + std::to_string(i) + " must be at least 0, but got " +
                             std::to_string(p.batch_sizes[i]) + ".");
    }
  }
  if (p.num_heads % p.num_kv_heads != 0) {
    return InvalidArgument("num_heads must be a multiple of num_kv_heads, but got num_heads=" +
                           std::to_string(p.num_heads) +
                           " and num_kv_heads=" + std::to_string(p.num_kv_heads) + ".");
  }
  if (&pass == &kGradientPass && !IsGiven(OperandOfGradient(p), p)) {
    return InvalidArgument(std::string("gradient_of names ") + GradientName(p) +
                           ", but the call has no operand " + GradientName(p) + ".");
  }
  if (Status status = CheckProduct(p); !status.ok()) return status;
  return CheckOptions(p);
}

Status CheckLimits(const AttentionProblem& p) {
  const auto out_of_range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return InvalidArgument(std::string(name) + " must be between " + std::to_string(low) + " and " +
                           std::to_string(high) + ", but got " + std::to_string(value) + ".");
  };
  constexpr int64_t kMaxLen = std::numeric_limits<int32_t>::max() - 4096;  // room for a block
  const struct { const char* name; int64_t value, low, high; } ranges[] = {
      {"head_dim", p.head_dim, 1, kMaxHeadDim},
      {"value_head_dim", p.value_head_dim, 1, kMaxHeadDim},
      {"q_len", p.q_len, 0, kMaxLen},
      {"kv_len", p.kv_len, 0, kMaxLen},
      {"num_heads", p.num_heads, 1, kMaxLen},
      {"num_kv_heads", p.num_kv_heads, 1, p.num_heads},
  };
  for (const auto& r : ranges) {
    if (r.value < r.low || r.value > r.high) return out_of_range(r.name, r.value, r.low, r.high);
  }
  return {};
}

KernelOptions OptionsOf(const AttentionProblem& p) {
  const double keep = 1 - p.dropout_rate;
  return {ClampToInt32(p.q_offset), WindowLimit(p.window_left), WindowLimit(p.window_right),
          static_cast<uint32_t>(std::min(std::nearbyint(keep * 0x1p32), 0x1p32 - 1)),
          static_cast<float>(1 / keep)};
}

const char* GradientName(const AttentionProblem& p) {
  return kTensors[OperandOfGradient(p)].name;
}

std::string ListText(const std::vector<int64_t>& values) {
  std::vector<std::string> parts;
  for (int64_t value : values) parts.push_back(std::to_string(value));
  return Join(parts);
}

}  // namespace jfm
