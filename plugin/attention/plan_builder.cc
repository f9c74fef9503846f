#include "plugin/attention/plan_builder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "plugin/attention/problem_checks.h"

namespace jfm {
namespace {

constexpr int64_t kMaskBlock = JFM_MASK_BLOCK;

// Parallel to kTensors.
constexpr std::array<TensorStrides AttentionParams::*, kTensors.size()> kStrides = {
    &AttentionParams::query, &AttentionParams::key, &AttentionParams::value,
    &AttentionParams::bias, &AttentionParams::mask, &AttentionParams::q_offsets,
    &AttentionParams::q_segment_ids, &AttentionParams::kv_segment_ids,
    &AttentionParams::query_lengths, &AttentionParams::kv_lengths, &AttentionParams::sinks,
    &AttentionParams::slopes, &AttentionParams::dropout_key, &AttentionParams::dropout_batch,
    &AttentionParams::dropout_head, &AttentionParams::out, &AttentionParams::logsumexp,
    &AttentionParams::dout, &AttentionParams::dlogsumexp, &AttentionParams::dquery,
    &AttentionParams::dkey, &AttentionParams::dvalue, &AttentionParams::gradient,
};

AttentionParams MakeParams(const AttentionProblem& p) {
  AttentionParams params;
  std::memset(&params, 0, sizeof(params));
  params.num_heads = static_cast<int32_t>(p.num_heads);
  params.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  params.num_groups = static_cast<int32_t>(p.num_heads / p.num_kv_heads);
  params.q_len = static_cast<int32_t>(p.q_len);
  params.kv_len = static_cast<int32_t>(p.kv_len);
  const KernelOptions options = OptionsOf(p);
  params.q_offset = options.q_offset;
  params.bias_col = static_cast<int32_t>(p.bias.col_stride);
  params.mask_col = static_cast<int32_t>(p.mask.col_stride);
  params.gradient_col = static_cast<int32_t>(p.gradient.col_stride);
  params.window_left = options.window_left;
  params.window_right = options.window_right;
  params.scale = p.scale;
  params.scale_log2 = static_cast<float>(static_cast<double>(p.scale) * M_LOG2E);
  params.soft_cap = p.logits_soft_cap;
  params.dropout_threshold = options.dropout_threshold;
  params.dropout_scale = options.dropout_scale;
  params.end_chunk_key = params.kv_len;
  params.is_first_chunk = params.is_last_chunk = 1;
  return params;
}

// Where the optional operands are bound in a kernel that uses kScores, if they are given.
constexpr Binding kScoreBindings[] = {
    {JFM_BUFFER_BIAS, Operand::kBias},
    {JFM_BUFFER_MASK, Operand::kMask},
    {JFM_BUFFER_Q_OFFSET, Operand::kQOffsets},
    {JFM_BUFFER_Q_SEGMENT_IDS, Operand::kQSegmentIds},
    {JFM_BUFFER_KV_SEGMENT_IDS, Operand::kKvSegmentIds},
    {JFM_BUFFER_QUERY_LENGTHS, Operand::kQuerySeqLengths},
    {JFM_BUFFER_KV_LENGTHS, Operand::kKeyValueSeqLengths},
    {JFM_BUFFER_SLOPES, Operand::kAlibiSlopes},
    {JFM_BUFFER_DROPOUT_KEY, Operand::kDropoutKey},
    {JFM_BUFFER_DROPOUT_BATCH, Operand::kDropoutBatchIndices},
    {JFM_BUFFER_DROPOUT_HEAD, Operand::kDropoutHeadIndices},
};

namespace constant {
#define JFM_INDEX(type, name, index) name = index,
enum Index : uint16_t { JFM_FUNCTION_CONSTANTS(JFM_INDEX) };
#undef JFM_INDEX
}  // namespace constant

// Pairs of a query and a key that it sees, over all batches and heads, by causality and
// window; what operands hide is not known here. The blocks at the edges do a little more.
double NumVisiblePairs(const AttentionProblem& p) {
  double rows = static_cast<double>(p.num_heads) * static_cast<double>(p.q_len);
  for (int64_t size : p.batch_sizes) rows *= static_cast<double>(size);
  const double kv_len = static_cast<double>(p.kv_len);
  // Keys beside that at the query's position: -1 means all.
  const double left = static_cast<double>(p.window_left);
  const double right = p.is_causal ? 0 : static_cast<double>(p.window_right);
  if (p.q_len == 0 || (left < 0 && right < 0)) return rows * kv_len;
  if (p.q_offsets.is_given) {  // somewhere
    return rows * (left < 0 || right < 0 ? kv_len : std::min(kv_len, left + right + 1));
  }
  // Row i sees the keys from i + q_offset - left to i + q_offset + right, cut to 0 … kv_len:
  // the difference of two means of clamped ramps.
  const double q_len = static_cast<double>(p.q_len);
  const auto mean = [&](double first) {
    const auto integral = [&](double x) {
      return x <= 0 ? 0.0 : x >= kv_len ? kv_len * (x - kv_len / 2) : x * x / 2;
    };
    return (integral(first + q_len) - integral(first)) / q_len;
  };
  const double offset = static_cast<double>(p.q_offset) - 0.5;
  const double end = right < 0 ? kv_len : mean(offset + right + 1);
  const double begin = left < 0 ? 0 : mean(offset - left);
  return rows * (end - begin);
}

// Cuts a launch into parts of at most `limit` of work: whole batches while that is enough, else
// heads, else blocks. Which threadgroup computes what, and so every bit, stays.
void AppendInParts(const Launch& launch, double limit, std::vector<Launch>& launches) {
  int64_t needed = static_cast<int64_t>(std::min(std::ceil(launch.work / limit), 1e9));
  const Size3& grid = launch.threadgroups;
  const auto part = [&needed](uint32_t size) {
    const int64_t per_part = std::max<int64_t>(1, size / std::max<int64_t>(needed, 1));
    needed = CeilDiv(needed, std::max<int64_t>(1, CeilDiv(size, per_part)));
    return static_cast<uint32_t>(per_part);
  };
  const uint32_t z_part = part(grid.z), y_part = part(grid.y), x_part = part(grid.x);
  const double groups = static_cast<double>(grid.x) * grid.y * grid.z;
  for (uint32_t z = 0; z < grid.z; z += z_part) {
    for (uint32_t y = 0; y < grid.y; y += y_part) {
      for (uint32_t x = 0; x < grid.x; x += x_part) {
        Launch& piece = launches.emplace_back(launch);
        piece.threadgroups = {std::min(x_part, grid.x - x), std::min(y_part, grid.y - y),
                              std::min(z_part, grid.z - z)};
        const uint32_t first[] = {x, y, z};
        for (int i = 0; i < 3; ++i) piece.params.first_group[i] += static_cast<int32_t>(first[i]);
        const Size3& size = piece.threadgroups;
        piece.work = launch.work * (static_cast<double>(size.x) * size.y * size.z / groups);
      }
    }
  }
}

}  // namespace

PlanBuilder::PlanBuilder(const AttentionProblem& problem, const Pass& pass,
                         const PlanContext& context)
    : p_(problem), context_(context), tensors_(pass.Tensors(problem)),
      params_(MakeParams(problem)) {
  if (context.choices != nullptr) choice_ = context.choices->Find(ShapeClass(problem), pass.name);
  plan_.is_measured = choice_ != nullptr;
  CollapseBatchDims();
  const size_t num_dims = batch_sizes_.size();
  num_outer_ = num_dims > JFM_MAX_BATCH_DIMS ? num_dims - JFM_MAX_BATCH_DIMS : 0;
  for (size_t i = num_outer_; i < num_dims; ++i) inner_batch_ *= batch_sizes_[i];
  SetParams();
}

void PlanBuilder::CollapseBatchDims() {
  for (size_t i = 0; i < p_.batch_sizes.size(); ++i) {
    if (p_.batch_sizes[i] == 1) continue;
    std::vector<int64_t> strides;
    for (size_t t : tensors_) strides.push_back((p_.*kTensors[t].view).batch_strides[i]);
    bool merge = !batch_sizes_.empty();
    for (size_t k = 0; merge && k < tensors_.size(); ++k) {
      merge = strides_.back()[k] == strides[k] * p_.batch_sizes[i];
    }
    if (merge) {
      batch_sizes_.back() *= p_.batch_sizes[i];
      strides_.back() = strides;
    } else {
      batch_sizes_.push_back(p_.batch_sizes[i]);
      strides_.push_back(strides);
    }
  }
}

void PlanBuilder::SetParams() {
  const size_t num_dims = batch_sizes_.size();
  params_.num_batch_dims = static_cast<int32_t>(num_dims - num_outer_);
  for (size_t i = num_outer_; i < num_dims; ++i) {
    const size_t d = i - num_outer_;
    params_.batch_sizes[d] = static_cast<int32_t>(batch_sizes_[i]);
    for (size_t k = 0; k < tensors_.size(); ++k) {
      (params_.*kStrides[tensors_[k]]).batch[d] = strides_[i][k];
    }
  }
  for (size_t t : tensors_) {
    (params_.*kStrides[t]).head = (p_.*kTensors[t].view).head_stride;
    (params_.*kStrides[t]).row = (p_.*kTensors[t].view).row_stride;
  }
  params_.delta.row = kDeltaNumbers;
  MakeDense(params_.delta, kDeltaNumbers * p_.q_len, nullptr);
  if (p_.mask.is_given) {
    params_.mask_blocks.row = params_.mask.row == 0 ? 0 : mask_cols();
    MakeDense(params_.mask_blocks, mask_rows() * mask_cols(), &params_.mask);
  }
}

int64_t PlanBuilder::mask_rows() const {
  return params_.mask.row == 0 ? 1 : CeilDiv(p_.q_len, kMaskBlock);
}

int64_t PlanBuilder::mask_cols() const {
  return params_.mask_col == 0 ? 1 : CeilDiv(p_.kv_len, kMaskBlock);
}

int64_t PlanBuilder::mask_block_bytes() const {
  return (params_.mask.row == 0 ? 1 : kMaskBlock) * (params_.mask_col == 0 ? 1 : kMaskBlock);
}

int64_t PlanBuilder::NumPairs(const TensorStrides& strides) const {
  int64_t count = strides.head != 0 ? p_.num_heads : 1;
  for (int d = 0; d < params_.num_batch_dims; ++d) {
    if (strides.batch[d] != 0) count *= batch_sizes_[num_outer_ + static_cast<size_t>(d)];
  }
  return count;
}

bool PlanBuilder::IsSharedOverOuter(Operand operand) const {
  for (size_t k = 0; k < tensors_.size(); ++k) {
    if (tensors_[k] != Index(operand)) continue;
    for (size_t i = 0; i < num_outer_; ++i) {
      if (strides_[i][k] == 0) return true;
    }
  }
  return false;
}

double PlanBuilder::PairWork(int64_t operations) const {
  return static_cast<double>(operations) * NumVisiblePairs(p_) / static_cast<double>(NumOuter());
}

Result<const Variant*> PlanBuilder::Choose(const Kernel& kernel) const {
  const bool has_widths = (kernel.uses & kWidths) != 0;
  const Dtype dtype = has_widths ? p_.dtype : Dtype::kFloat32;
  const int64_t head_dim = has_widths ? std::max(p_.head_dim, p_.value_head_dim) : 1;
  if (choice_ != nullptr) {
    for (const Variant* v : choice_->variants) {
      if (std::strcmp(v->kernel, kernel.name) == 0 && v->dtype == dtype) return v;
    }
  }
  return DefaultVariant(kernel.name, dtype, head_dim, context_.gpu_family);
}

Status PlanBuilder::Add(const Kernel& kernel, std::vector<Binding> bindings, double work,
                        const MakeGrid& grid) {
  Result<const Variant*> variant = Choose(kernel);
  if (!variant.ok()) return variant.status();
  const Variant& v = **variant;
  if (kernel.uses & kScores) {
    for (const Binding& binding : kScoreBindings) AddIfGiven(binding, bindings);
    if (p_.mask.is_given) bindings.push_back({JFM_BUFFER_MASK_BLOCKS, Operand::kMaskBlocks});
  }
  if (kernel.uses & kSinks) AddIfGiven({JFM_BUFFER_SINKS, Operand::kSinks}, bindings);
  Launch launch{&v, {}, std::move(bindings), params_, {}, {}, {}, work};
  const auto [size, first] = grid(v, launch.params);
  for (size_t i = 0; i < size.size(); ++i) {
    if (first[i] + size[i] > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(std::string(kernel.name) + " would need a grid of " +
                             std::to_string(first[0] + size[0]) + " x " +
                             std::to_string(first[1] + size[1]) + " x " +
                             std::to_string(first[2] + size[2]) +
                             " threadgroups, which is more than 2^31 - 1 in one dimension.");
    }
    launch.params.first_group[i] = static_cast<int32_t>(first[i]);
  }
  if (size[0] == 0 || size[1] == 0 || size[2] == 0) return {};
  launch.constants = MakeConstants(kernel, v, launch.params);
  launch.threadgroups = {static_cast<uint32_t>(size[0]), static_cast<uint32_t>(size[1]),
                         static_cast<uint32_t>(size[2])};
  launch.threads_per_threadgroup = {static_cast<uint32_t>(32 * v.num_simdgroups), 1, 1};
  plan_.launches.push_back(std::move(launch));
  return {};
}

Status PlanBuilder::AddQueryBlocks(const Kernel& kernel, std::vector<Binding> bindings,
                                   double work) {
  return Add(kernel, std::move(bindings), work, [&](const Variant& v, AttentionParams&) -> Grid {
    return {{CeilDiv(p_.q_len, v.block_q), p_.num_heads, inner_batch_}};
  });
}

void PlanBuilder::NeedScratch(Operand operand, int64_t bytes) {
  plan_.ScratchBytes(operand) = std::max(plan_.ScratchBytes(operand), bytes);
}

Plan PlanBuilder::Finish() {
  const std::vector<Launch> launches = std::move(plan_.launches);
  plan_.launches.clear();
  const int64_t num_outer = NumOuter();
  for (int64_t index = 0; index < num_outer; ++index) {
    std::array<int64_t, kNumOperands> offsets{};
    int64_t rest = index;
    for (size_t i = num_outer_; i-- > 0;) {
      const int64_t position = rest % batch_sizes_[i];
      rest /= batch_sizes_[i];
      for (size_t k = 0; k < tensors_.size(); ++k) {
        offsets[tensors_[k]] += position * strides_[i][k];
      }
    }
    for (Launch launch : launches) {
      launch.offsets = offsets;
      AppendInParts(launch, context_.max_launch_work, plan_.launches);
    }
  }
  return std::move(plan_);
}

void PlanBuilder::AddIfGiven(const Binding& binding, std::vector<Binding>& bindings) const {
  if (IsGiven(Index(binding.operand), p_)) bindings.push_back(binding);
}

// Strides over the inner batch dimensions and heads for scratch of `pair_size` elements per
// pair, dense; shared where `like` is.
void PlanBuilder::MakeDense(TensorStrides& strides, int64_t pair_size,
                            const TensorStrides* like) const {
  int64_t stride = pair_size;
  const auto set = [&](int64_t& target, int64_t like_stride, int64_t size) {
    if (like != nullptr && like_stride == 0) return;
    target = stride;
    stride *= size;
  };
  set(strides.head, like != nullptr ? like->head : 0, p_.num_heads);
  for (int d = params_.num_batch_dims - 1; d >= 0; --d) {
    set(strides.batch[d], like != nullptr ? like->batch[d] : 0,
        batch_sizes_[num_outer_ + static_cast<size_t>(d)]);
  }
}

// Indices of the batch dimensions that the kernels cannot address.
int64_t PlanBuilder::NumOuter() const {
  int64_t count = 1;
  for (size_t i = 0; i < num_outer_; ++i) count *= batch_sizes_[i];
  return count;
}

std::vector<FunctionConstant> PlanBuilder::MakeConstants(const Kernel& kernel, const Variant& v,
                                                         const AttentionParams& params) const {
  const AttentionProblem& p = p_;
  std::map<int, int32_t> values;
  if (kernel.uses & kWidths) {
    values[constant::head_dim] = static_cast<int32_t>(p.head_dim);
    values[constant::value_head_dim] = static_cast<int32_t>(p.value_head_dim);
  }
  if (kernel.uses & (kScores | kUnit)) {
    values[constant::has_bias] = p.bias.is_given;
    values[constant::has_slopes] = p.alibi_slopes.is_given;
    values[constant::has_softcap] = p.logits_soft_cap > 0;
  }
  if (kernel.uses & kScores) {
    values[constant::is_causal] = p.is_causal;
    // The kernel that reads a score gradient walks the blocks in which it was written, too.
    const auto is_aligned = [](int64_t size, int block, int32_t score_block) {
      return size % block == 0 && (score_block == 0 || size % score_block == 0);
    };
    values[constant::aligned_q] = is_aligned(p.q_len, v.block_q, params.score_block_q);
    values[constant::aligned_kv] = is_aligned(p.kv_len, v.block_kv, params.score_block_kv);
    values[constant::bias_dtype] = p.bias.is_given ? static_cast<int32_t>(p.bias_dtype) : 0;
    values[constant::has_mask] = p.mask.is_given;
    values[constant::has_q_offset] = p.q_offsets.is_given;
    values[constant::has_segment_ids] = p.q_segment_ids.is_given;
    values[constant::has_query_lengths] = p.query_seq_lengths.is_given;
    values[constant::has_kv_lengths] = p.key_value_seq_lengths.is_given;
    values[constant::has_dropout] = p.dropout_key.is_given;
    values[constant::has_window] = params.window_left >= 0 || params.window_right >= 0;
    for (const TensorStrides* strides : {&params.query, &params.key, &params.value, &params.dout}) {
      if (strides->row >= JFM_WIDE_ROW) values[constant::has_wide_rows] = 1;
    }
  }
  if (kernel.uses & kSinks) values[constant::has_sinks] = p.sinks.is_given;
  if (kernel.uses & kGradient) {
    const bool is_bias = p.gradient_of == GradientOf::kBias;
    values[constant::is_slope_gradient] = p.gradient_of == GradientOf::kSlopes;
    values[constant::sums_rows] = params.gradient.row == 0;
    values[constant::sums_cols] = params.gradient_col == 0;
    values[constant::gradient_dtype] = is_bias ? static_cast<int32_t>(p.bias_dtype) : 0;
  }
  if (kernel.uses & kWrites) {
    values[constant::writes_score_gradient] = params.num_key_fragments > 0;
    values[constant::writes_partials] = params.num_parts > 1;
  }
  std::vector<FunctionConstant> constants;
#define JFM_PUSH(type, name, index)                                                             \
  constants.push_back({index, sizeof(type) == 1 ? FunctionConstant::Type::kBool                 \
                                                : FunctionConstant::Type::kInt,                 \
                       values[index]});
  JFM_FUNCTION_CONSTANTS(JFM_PUSH)
#undef JFM_PUSH
  return constants;
}

}  // namespace jfm
