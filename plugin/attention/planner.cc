#include "plugin/attention/planner.h"

#include <algorithm>
#include <limits>
#include <string>

#include "plugin/attention/plan_builder.h"
#include "plugin/attention/plan_steps.h"
#include "plugin/attention/problem_checks.h"

namespace jfm {
namespace {

constexpr Kernel kForward = {"attention_forward", kWidths | kScores | kSinks};
constexpr Kernel kShortForward = {"attention_short_forward", kWidths | kScores};
constexpr Kernel kShortForwardCombine = {"attention_short_forward_combine",
                                         kWidths | kUnit | kSinks};
constexpr Kernel kBiasGradient = {"attention_bias_gradient", kWidths | kScores | kGradient};
constexpr Kernel kBiasGradientCombine = {"attention_bias_gradient_combine", kGradient};
constexpr Kernel kSinksGradient = {"attention_sinks_gradient", kUnit};

constexpr int64_t kMaxParts = 64;  // of a gradient's sum
constexpr int64_t kTargetThreadgroups = 1024;  // of a gradient

Result<Plan> PlanForward(const AttentionProblem& p, const PlanContext& context) {
  if (Status status = CheckLimits(p); !status.ok()) return status;
  PlanBuilder builder(p, kForwardPass, context);
  if (builder.inner_rows() == 0) return builder.Finish();
  if (Status status = AddMaskBlocks(builder, p); !status.ok()) return status;
  const double work = builder.PairWork(2 * (p.head_dim + p.value_head_dim));  // S and O
  Status status;
  if (p.q_len <= kShortQuery) {
    builder.set_form(Form::kShort);
    status = AddSplit(builder, p, kShortForward,
                      {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
                       {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_SOFTMAX, Operand::kPartialSoftmax}},
                      kShortForwardCombine,
                      {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_SOFTMAX, Operand::kPartialSoftmax},
                       {JFM_BUFFER_OUT, Operand::kOut},
                       {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
                      p.value_head_dim, /*num_statistics=*/2, work);
  } else {
    status = builder.AddQueryBlocks(
        kForward,
        {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
         {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_OUT, Operand::kOut},
         {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
        work);
  }
  if (!status.ok()) return status;
  return builder.Finish();
}

// A tile of the gradient of bias, or all of a slope's, per column of threadgroups, which
// share its sum as parts. `is_empty`: over nothing.
Status AddBiasGradient(PlanBuilder& builder, const AttentionProblem& p, bool is_empty) {
  const bool sums_rows = builder.params().gradient.row == 0;
  const bool sums_cols = builder.params().gradient_col == 0;
  const int64_t num_kept = builder.NumPairs(builder.params().gradient);
  const int64_t pairs = builder.inner_batch() * p.num_heads;
  const int64_t num_summed = is_empty || num_kept == 0 ? 0 : pairs / num_kept;
  const int64_t num_elements =
      num_kept * (sums_rows ? 1 : p.q_len) * (sums_cols ? 1 : p.kv_len);
  int64_t num_parts = 1, blocks_per_part = 0;
  const auto set_parts = [&](AttentionParams& params) {
    params.num_summed = static_cast<int32_t>(num_summed);
    params.num_parts = static_cast<int32_t>(num_parts);
    params.blocks_per_part = static_cast<int32_t>(blocks_per_part);
  };
  const Status status = builder.Add(
      kBiasGradient,
      BackwardBindings({{JFM_BUFFER_PARTIAL, Operand::kPartial},
                        {JFM_BUFFER_GRADIENT, Operand::kGradient}}),
      builder.PairWork(2 * (p.head_dim + p.value_head_dim)),  // S, dP
      [&](const Variant& v, AttentionParams& params) -> Grid {
        const int64_t row_blocks = CeilDiv(p.q_len, v.block_q);
        const int64_t col_blocks = CeilDiv(p.kv_len, v.block_kv);
        const int64_t x = (sums_rows ? 1 : row_blocks) * (sums_cols ? 1 : col_blocks);
        // Like the parts of SplitKeys a function of the shape alone.
        const int64_t num_blocks =
            num_summed * (sums_rows ? row_blocks : 1) * (sums_cols ? col_blocks : 1);
        if (x * num_kept > 0 && num_blocks > 0) {
          const int64_t fitting = kMaxPartialBytes / (4 * num_elements);
          const int64_t most = std::min({kMaxParts, num_blocks, fitting});
          num_parts = std::clamp<int64_t>(kTargetThreadgroups / (x * num_kept), 1,
                                          std::max<int64_t>(most, 1));
          blocks_per_part = CeilDiv(num_blocks, num_parts);
          num_parts = CeilDiv(num_blocks, blocks_per_part);
        }
        set_parts(params);
        return {{x, num_parts, num_kept}};
      });
  if (!status.ok()) return status;
  if (std::max(num_summed, blocks_per_part) > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("the gradient of " + std::string(GradientName(p)) +
                           " would be a sum over more than 2^31 - 1 blocks of scores at once.");
  }
  if (num_parts == 1) return {};
  builder.NeedScratch(Operand::kPartial, num_parts * num_elements * 4);
  return builder.Add(
      kBiasGradientCombine,
      {{JFM_BUFFER_PARTIAL, Operand::kPartial}, {JFM_BUFFER_GRADIENT, Operand::kGradient}}, 0,
      [&](const Variant& v, AttentionParams& params) -> Grid {
        set_parts(params);
        return {{CeilDiv(num_elements, 32 * v.num_simdgroups), 1, 1}};
      });
}

Status AddSinksGradient(PlanBuilder& builder, const AttentionProblem& p, bool is_empty) {
  const int64_t num_kept = builder.NumPairs(builder.params().gradient);
  const int64_t pairs = builder.inner_batch() * p.num_heads;
  return builder.Add(
      kSinksGradient,
      {{JFM_BUFFER_SINKS, Operand::kSinks}, {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
       {JFM_BUFFER_DELTA, Operand::kDelta}, {JFM_BUFFER_GRADIENT, Operand::kGradient}},
      BytesWork(builder.inner_rows(), 12),
      [&](const Variant&, AttentionParams& params) -> Grid {
        params.num_summed =
            is_empty || num_kept == 0 ? 0 : static_cast<int32_t>(pairs / num_kept);
        return {{1, 1, num_kept}};
      });
}

Result<Plan> PlanGradient(const AttentionProblem& problem, const PlanContext& context) {
  if (Status status = CheckLimits(problem); !status.ok()) return status;
  // A gradient that is summed over an empty dimension is 0, like one over nothing at an index
  // of that dimension: the grid needs none of it.
  AttentionProblem p = problem;
  bool is_empty = false;
  for (size_t i = 0; i < p.batch_sizes.size(); ++i) {
    if (p.batch_sizes[i] != 0 || p.gradient.batch_strides[i] != 0) continue;
    is_empty = true;
    p.batch_sizes[i] = 1;
  }
  PlanBuilder builder(p, kGradientPass, context);
  if (builder.IsSharedOverOuter(Operand::kGradient)) {
    return InvalidArgument("the gradient of " + std::string(GradientName(p)) +
                           " cannot be summed over outer batch dimensions of a call with more "
                           "than " + std::to_string(JFM_MAX_BATCH_DIMS) + " of them, but got " +
                           "batch sizes [" + ListText(problem.batch_sizes) + "].");
  }
  const bool is_sinks = p.gradient_of == GradientOf::kSinks;
  Status status;
  if (!is_empty) {
    status = AddMaskBlocks(builder, p);
    if (status.ok()) status = AddDelta(builder, p);
    if (!status.ok()) return status;
  }
  status = is_sinks ? AddSinksGradient(builder, p, is_empty)
                    : AddBiasGradient(builder, p, is_empty);
  if (!status.ok()) return status;
  return builder.Finish();
}

}  // namespace

const Pass kForwardPass = {"forward", Operand::kDropoutHeadIndices, Operand::kOut,
                           Operand::kLogsumexp, PlanForward};
const Pass kGradientPass = {"gradient", Operand::kDlogsumexp, Operand::kGradient,
                            Operand::kGradient, PlanGradient};

std::vector<size_t> Pass::Tensors(const AttentionProblem& problem) const {
  std::vector<size_t> tensors;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    if (IsResult(i) || (i <= Index(last_operand) && IsGiven(i, problem))) tensors.push_back(i);
  }
  return tensors;
}

}  // namespace jfm
