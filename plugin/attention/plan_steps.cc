#include "plugin/attention/plan_steps.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace jfm {
namespace {

constexpr Kernel kDelta = {"attention_delta", kWidths | kScores | kSinks};
constexpr Kernel kMaskBlocks = {"attention_mask_blocks", 0};

constexpr int64_t kMaxSplits = 64;  // parts of the key range
constexpr int64_t kMinKeysPerSplit = 64;

// How the keys of a short-query problem are split. A function of the shape alone, so that
// the sums, and with them the bits, do not depend on the machine.
struct Split {
  int64_t num_splits, keys_per_split;
};

Split SplitKeys(const AttentionProblem& p, int64_t inner_batch, int block_kv) {
  const int64_t row_blocks = CeilDiv(p.q_len * (p.num_heads / p.num_kv_heads), 8);
  const int64_t simdgroups = std::max<int64_t>(1, inner_batch * p.num_kv_heads * row_blocks);
  const int64_t wanted = std::clamp<int64_t>(kTargetSimdgroups / simdgroups, 1, kMaxSplits);
  const int64_t keys = std::max(kMinKeysPerSplit, CeilDiv(p.kv_len, wanted));
  const int64_t keys_per_split = CeilDiv(keys, block_kv) * block_kv;
  return {std::max<int64_t>(1, CeilDiv(p.kv_len, keys_per_split)), keys_per_split};
}

constexpr Binding kBackwardInputs[] = {
    {JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
    {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
    {JFM_BUFFER_DOUT, Operand::kDout},   {JFM_BUFFER_DELTA, Operand::kDelta}};

}  // namespace

Status AddMaskBlocks(PlanBuilder& builder, const AttentionProblem& p) {
  if (!p.mask.is_given || p.q_len == 0 || p.kv_len == 0) return {};
  const int64_t num_pairs = builder.NumPairs(builder.params().mask);
  const int64_t num_blocks = num_pairs * builder.mask_rows() * builder.mask_cols();
  builder.NeedScratch(Operand::kMaskBlocks, num_blocks);
  return builder.Add(
      kMaskBlocks,
      {{JFM_BUFFER_MASK, Operand::kMask}, {JFM_BUFFER_MASK_BLOCKS, Operand::kMaskBlocks}},
      BytesWork(num_blocks, builder.mask_block_bytes()),
      [&](const Variant& v, AttentionParams&) -> Grid {
        return {{CeilDiv(builder.mask_cols(), v.num_simdgroups), builder.mask_rows(), num_pairs}};
      });
}

// Its work is that of rows with an ordinary logsumexp, which need no scores.
Status AddDelta(PlanBuilder& builder, const AttentionProblem& p) {
  builder.NeedScratch(Operand::kDelta, builder.inner_rows() * kDeltaNumbers * 4);
  return builder.AddQueryBlocks(
      kDelta,
      {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
       {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
       {JFM_BUFFER_OUT, Operand::kOut}, {JFM_BUFFER_DOUT, Operand::kDout},
       {JFM_BUFFER_DLOGSUMEXP, Operand::kDlogsumexp}, {JFM_BUFFER_DELTA, Operand::kDelta}},
      BytesWork(builder.inner_rows(), 2 * p.value_head_dim * SizeBytes(p.dtype)));
}

Status AddSplit(PlanBuilder& builder, const AttentionProblem& p, const Kernel& kernel,
                std::vector<Binding> bindings, const Kernel& combine,
                std::vector<Binding> combine_bindings, int64_t row_width,
                int64_t num_statistics, double work) {
  Split split{};
  const auto set_split = [&](AttentionParams& params) {
    params.num_splits = static_cast<int32_t>(split.num_splits);
    params.keys_per_split = static_cast<int32_t>(split.keys_per_split);
  };
  const Status status = builder.Add(
      kernel, std::move(bindings), work, [&](const Variant& v, AttentionParams& params) -> Grid {
        split = SplitKeys(p, builder.inner_batch(), v.block_kv);
        set_split(params);
        return {{CeilDiv(split.num_splits, v.num_simdgroups),
                 p.num_kv_heads * CeilDiv(p.q_len * params.num_groups, 8), builder.inner_batch()}};
      });
  if (!status.ok()) return status;
  const int64_t num_rows = split.num_splits * builder.inner_rows();
  builder.NeedScratch(Operand::kPartial, num_rows * row_width * 4);
  builder.NeedScratch(Operand::kPartialSoftmax, num_rows * num_statistics * 4);
  return builder.Add(combine, std::move(combine_bindings), 0,
                     [&](const Variant& v, AttentionParams& params) -> Grid {
                       set_split(params);
                       return {{CeilDiv(builder.inner_rows(), v.num_simdgroups), 1, 1}};
                     });
}

std::vector<Binding> BackwardBindings(std::initializer_list<Binding> results) {
  std::vector<Binding> bindings(std::begin(kBackwardInputs), std::end(kBackwardInputs));
  bindings.insert(bindings.end(), results);
  return bindings;
}

}  // namespace jfm
