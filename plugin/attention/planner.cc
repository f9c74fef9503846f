#include "plugin/attention/planner.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace jfm {
namespace {

constexpr Variant kVariants[] = {
#include "variants.inc"
};

constexpr int64_t kShortQuery = 8;      // the split kernels take q_len up to this
constexpr int64_t kMaxSplits = 64;      // parts of the key range
constexpr int64_t kMinKeysPerSplit = 64;
constexpr int64_t kTargetSimdgroups = 1024;  // enough to fill the largest GPU (M3 Ultra: 80 cores)
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaskBlock = JFM_MASK_BLOCK;
constexpr int64_t kMaxParts = 64;  // of a gradient's sum
constexpr int64_t kTargetThreadgroups = 1024;  // of a gradient
constexpr int64_t kMaxPartialBytes = int64_t{16} << 20;

std::atomic<double> max_launch_work{kMaxWorkAtOnce};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// Batch dimensions after dropping those of size 1 and merging neighbours that every
// operand walks with one stride.
struct BatchDims {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // [dimension][tensor of the pass]
};

BatchDims CollapseBatchDims(const AttentionProblem& p, const std::vector<size_t>& tensors) {
  BatchDims dims;
  for (size_t i = 0; i < p.batch_sizes.size(); ++i) {
    if (p.batch_sizes[i] == 1) continue;
    std::vector<int64_t> strides;
    for (size_t t : tensors) strides.push_back((p.*kTensors[t].view).batch_strides[i]);
    bool merge = !dims.sizes.empty();
    for (size_t k = 0; merge && k < tensors.size(); ++k) {
      merge = dims.strides.back()[k] == strides[k] * p.batch_sizes[i];
    }
    if (merge) {
      dims.sizes.back() *= p.batch_sizes[i];
      dims.strides.back() = strides;
    } else {
      dims.sizes.push_back(p.batch_sizes[i]);
      dims.strides.push_back(strides);
    }
  }
  return dims;
}

int32_t ClampToInt32(int64_t x) {
  return static_cast<int32_t>(std::clamp<int64_t>(x, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}

// A limit that 32 bits cannot hold is farther than any key.
int32_t WindowLimit(int64_t limit) {
  return limit > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(limit);
}

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
  return params;
}

// What a kernel's pipeline depends on. Constants that it does not depend on are 0, so that
// calls which differ in nothing else share the pipeline.
enum Use : unsigned {
  kWidths = 1,    // the head_dims, and its rows of the table are by dtype
  kScores = 2,    // who sees whom: all operands of the scores, tiles
  kSinks = 4,
  kGradient = 8,  // what the gradient is of and how it is summed
  kUnit = 16,     // the unit of the scores, which bias, slopes and softcap change
};
struct Kernel {
  const char* name;
  unsigned uses;
};
constexpr Kernel kForward = {"attention_forward", kWidths | kScores | kSinks};
constexpr Kernel kBackwardDq = {"attention_backward_dq", kWidths | kScores};
constexpr Kernel kBackwardDkv = {"attention_backward_dkv", kWidths | kScores};
constexpr Kernel kDelta = {"attention_delta", kWidths | kScores | kSinks};
constexpr Kernel kShortForward = {"attention_short_forward", kWidths | kScores};
constexpr Kernel kShortForwardCombine = {"attention_short_forward_combine",
                                         kWidths | kUnit | kSinks};
constexpr Kernel kShortDq = {"attention_short_dq", kWidths | kScores};
constexpr Kernel kShortDqCombine = {"attention_short_dq_combine", kWidths};
constexpr Kernel kMaskBlocks = {"attention_mask_blocks", 0};
constexpr Kernel kBiasGradient = {"attention_bias_gradient", kWidths | kScores | kGradient};
constexpr Kernel kBiasGradientCombine = {"attention_bias_gradient_combine", kGradient};
constexpr Kernel kSinksGradient = {"attention_sinks_gradient", 0};

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

Result<const Variant*> FindVariant(const Kernel& kernel, const AttentionProblem& p) {
  const bool has_widths = (kernel.uses & kWidths) != 0;
  const Dtype dtype = has_widths ? p.dtype : Dtype::kFloat32;
  const int64_t head_dim = has_widths ? std::max(p.head_dim, p.value_head_dim) : 1;
  for (const Variant& v : kVariants) {
    if (std::strcmp(v.kernel, kernel.name) == 0 && v.dtype == dtype && v.head_dim >= head_dim) {
      return &v;
    }
  }
  return Internal(std::string("the variant table has no row of ") + kernel.name + " for " +
                  Name(dtype) + " and head_dim " + std::to_string(head_dim));
}

namespace constant {
#define JFM_INDEX(type, name, index) name = index,
enum Index : uint16_t { JFM_FUNCTION_CONSTANTS(JFM_INDEX) };
#undef JFM_INDEX
}  // namespace constant

std::vector<FunctionConstant> MakeConstants(const AttentionProblem& p, const Kernel& kernel,
                                            const Variant& v, const AttentionParams& params) {
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
    values[constant::aligned_q] = p.q_len % v.block_q == 0;
    values[constant::aligned_kv] = p.kv_len % v.block_kv == 0;
    values[constant::bias_dtype] = p.bias.is_given ? static_cast<int32_t>(p.bias_dtype) : 0;
    values[constant::has_mask] = p.mask.is_given;
    values[constant::has_q_offset] = p.q_offsets.is_given;
    values[constant::has_segment_ids] = p.q_segment_ids.is_given;
    values[constant::has_query_lengths] = p.query_seq_lengths.is_given;
    values[constant::has_kv_lengths] = p.key_value_seq_lengths.is_given;
    values[constant::has_dropout] = p.dropout_key.is_given;
    values[constant::has_window] = params.window_left >= 0 || params.window_right >= 0;
  }
  if (kernel.uses & kSinks) values[constant::has_sinks] = p.sinks.is_given;
  if (kernel.uses & kGradient) {
    const bool is_bias = p.gradient_of == GradientOf::kBias;
    values[constant::is_slope_gradient] = p.gradient_of == GradientOf::kSlopes;
    values[constant::sums_rows] = params.gradient.row == 0;
    values[constant::sums_cols] = params.gradient_col == 0;
    values[constant::gradient_dtype] = is_bias ? static_cast<int32_t>(p.bias_dtype) : 0;
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

const char* GradientName(const AttentionProblem& p) {
  return kTensors[OperandOfGradient(p)].name;
}

std::string ListText(const std::vector<int64_t>& values) {
  std::vector<std::string> parts;
  for (int64_t value : values) parts.push_back(std::to_string(value));
  return Join(parts);
}

int64_t NumRows(const AttentionProblem& p) {
  int64_t rows = p.num_heads * p.q_len;
  for (int64_t size : p.batch_sizes) rows *= size;
  return rows;
}

// Pairs of a query and a key that it sees, over all batches and heads, by causality and
// window; what operands hide is not known here. The blocks at the edges do a little more.
double NumVisiblePairs(const AttentionProblem& p) {
  const double rows = static_cast<double>(NumRows(p));
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

// The work of a launch that little more than reads: a GPU computes some 32 operations in the
// time that a byte takes (the 7-core M1: 2.3 TFLOP/s, 68 GB/s).
double BytesWork(int64_t count, int64_t bytes_each) {
  return 32.0 * static_cast<double>(count) * static_cast<double>(bytes_each);
}

// Cuts a launch into parts of at most max_launch_work: whole batches while that is enough,
// else heads, else blocks. Which threadgroup computes what, and so every bit, stays.
void AppendInParts(const Launch& launch, std::vector<Launch>& launches) {
  const double limit = max_launch_work.load(std::memory_order_relaxed);
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
        for (int i = 0; i < 3; ++i) piece.params.first_group[i] = static_cast<int32_t>(first[i]);
        const Size3& size = piece.threadgroups;
        piece.work = launch.work * (static_cast<double>(size.x) * size.y * size.z / groups);
      }
    }
  }
}

// The kernels of a pass, in launch order, for one index of the outer batch dimensions.
class PlanBuilder {
 public:
  PlanBuilder(const AttentionProblem& problem, const Pass& pass)
      : p_(problem), tensors_(pass.Tensors(problem)),
        dims_(CollapseBatchDims(problem, tensors_)), params_(MakeParams(problem)) {
    const size_t num_dims = dims_.sizes.size();
    num_outer_ = num_dims > JFM_MAX_BATCH_DIMS ? num_dims - JFM_MAX_BATCH_DIMS : 0;
    params_.num_batch_dims = static_cast<int32_t>(num_dims - num_outer_);
    for (size_t i = num_outer_; i < num_dims; ++i) {
      const size_t d = i - num_outer_;
      params_.batch_sizes[d] = static_cast<int32_t>(dims_.sizes[i]);
      inner_batch_ *= dims_.sizes[i];
      for (size_t k = 0; k < tensors_.size(); ++k) {
        (params_.*kStrides[tensors_[k]]).batch[d] = dims_.strides[i][k];
      }
    }
    for (size_t t : tensors_) {
      (params_.*kStrides[t]).head = (p_.*kTensors[t].view).head_stride;
      (params_.*kStrides[t]).row = (p_.*kTensors[t].view).row_stride;
    }
    params_.delta.row = 2;  // delta, factor
    MakeDense(params_.delta, 2 * p_.q_len, nullptr);
    if (p_.mask.is_given) {
      params_.mask_blocks.row = params_.mask.row == 0 ? 0 : mask_cols();
      MakeDense(params_.mask_blocks, mask_rows() * mask_cols(), &params_.mask);
    }
  }

  const AttentionParams& params() const { return params_; }
  int64_t inner_batch() const { return inner_batch_; }
  int64_t inner_rows() const { return inner_batch_ * p_.num_heads * p_.q_len; }
  // Blocks of the mask; one along an axis over which it is shared.
  int64_t mask_rows() const { return params_.mask.row == 0 ? 1 : CeilDiv(p_.q_len, kMaskBlock); }
  int64_t mask_cols() const { return params_.mask_col == 0 ? 1 : CeilDiv(p_.kv_len, kMaskBlock); }

  // Of a block, all in all.
  int64_t mask_block_bytes() const {
    return (params_.mask.row == 0 ? 1 : kMaskBlock) * (params_.mask_col == 0 ? 1 : kMaskBlock);
  }

  // Pairs of an inner batch index and a head that have elements of their own.
  int64_t NumPairs(const TensorStrides& strides) const {
    int64_t count = strides.head != 0 ? p_.num_heads : 1;
    for (int d = 0; d < params_.num_batch_dims; ++d) {
      if (strides.batch[d] != 0) count *= dims_.sizes[num_outer_ + static_cast<size_t>(d)];
    }
    return count;
  }

  // Whether a tensor is shared over a batch dimension that the kernels cannot address.
  bool IsSharedOverOuter(Operand operand) const {
    for (size_t k = 0; k < tensors_.size(); ++k) {
      if (tensors_[k] != Index(operand)) continue;
      for (size_t i = 0; i < num_outer_; ++i) {
        if (dims_.strides[i][k] == 0) return true;
      }
    }
    return false;
  }

  // The work of a launch with so many operations per visible pair of query and key.
  double PairWork(int64_t operations) const {
    return static_cast<double>(operations) * NumVisiblePairs(p_) / NumOuter();
  }

  // `grid` sees the variant, because a grid counts its blocks; without threadgroups there is
  // no launch.
  template <class Grid>
  Status Add(const Kernel& kernel, std::vector<Binding> bindings, double work, Grid grid) {
    Result<const Variant*> variant = FindVariant(kernel, p_);
    if (!variant.ok()) return variant.status();
    const Variant& v = **variant;
    if (kernel.uses & kScores) {
      for (const Binding& binding : kScoreBindings) AddBinding(binding, bindings);
      if (p_.mask.is_given) bindings.push_back({JFM_BUFFER_MASK_BLOCKS, Operand::kMaskBlocks});
    }
    if (kernel.uses & kSinks) AddBinding({JFM_BUFFER_SINKS, Operand::kSinks}, bindings);
    Launch launch{&v, {}, std::move(bindings), params_, {}, {}, {}, 0};
    int64_t x, y, z;
    grid(v, launch.params, x, y, z);
    for (int64_t n : {x, y, z}) {
      if (n > std::numeric_limits<int32_t>::max()) {
        return InvalidArgument(std::string(kernel.name) + " would need a grid of " +
                               std::to_string(x) + " x " + std::to_string(y) + " x " +
                               std::to_string(z) +
                               " threadgroups, which is more than 2^31 - 1 in one dimension.");
      }
    }
    if (x == 0 || y == 0 || z == 0) return {};
    launch.constants = MakeConstants(p_, kernel, v, launch.params);
    launch.threadgroups = {static_cast<uint32_t>(x), static_cast<uint32_t>(y),
                           static_cast<uint32_t>(z)};
    launch.threads_per_threadgroup = {static_cast<uint32_t>(32 * v.num_simdgroups), 1, 1};
    launch.work = work;
    launches_.push_back(std::move(launch));
    return {};
  }

  // A threadgroup per block of queries, head and batch index.
  Status AddQueryBlocks(const Kernel& kernel, std::vector<Binding> bindings, double work) {
    return Add(kernel, std::move(bindings), work,
               [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
                 x = CeilDiv(p_.q_len, v.block_q);
                 y = p_.num_heads;
                 z = inner_batch_;
               });
  }

  // Repeats the launches for every index of the outer batch dimensions.
  std::vector<Launch> Finish() const {
    std::vector<Launch> all;
    const int64_t num_outer = NumOuter();
    for (int64_t index = 0; index < num_outer; ++index) {
      std::array<int64_t, kNumOperands> offsets{};
      int64_t rest = index;
      for (size_t i = num_outer_; i-- > 0;) {
        const int64_t position = rest % dims_.sizes[i];
        rest /= dims_.sizes[i];
        for (size_t k = 0; k < tensors_.size(); ++k) {
          offsets[tensors_[k]] += position * dims_.strides[i][k];
        }
      }
      for (Launch launch : launches_) {
        launch.offsets = offsets;
        AppendInParts(launch, all);
      }
    }
    return all;
  }

 private:
  void AddBinding(const Binding& binding, std::vector<Binding>& bindings) const {
    if (IsGiven(Index(binding.operand), p_)) bindings.push_back(binding);
  }

  // Strides over the inner batch dimensions and heads for scratch of `pair_size` elements per
  // pair, dense; shared where `like` is.
  void MakeDense(TensorStrides& strides, int64_t pair_size, const TensorStrides* like) const {
    int64_t stride = pair_size;
    const auto set = [&](int64_t& target, int64_t like_stride, int64_t size) {
      if (like != nullptr && like_stride == 0) return;
      target = stride;
      stride *= size;
    };
    set(strides.head, like != nullptr ? like->head : 0, p_.num_heads);
    for (int d = params_.num_batch_dims - 1; d >= 0; --d) {
      set(strides.batch[d], like != nullptr ? like->batch[d] : 0,
          dims_.sizes[num_outer_ + static_cast<size_t>(d)]);
    }
  }

  // Indices of the batch dimensions that the kernels cannot address.
  int64_t NumOuter() const {
    int64_t count = 1;
    for (size_t i = 0; i < num_outer_; ++i) count *= dims_.sizes[i];
    return count;
  }

  const AttentionProblem& p_;
  std::vector<size_t> tensors_;
  BatchDims dims_;
  AttentionParams params_;
  size_t num_outer_ = 0;
  int64_t inner_batch_ = 1;
  std::vector<Launch> launches_;
};

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

// The split kernel and its combine step; `row_width` is the length of a partial row.
Status AddSplit(PlanBuilder& builder, Plan& plan, const AttentionProblem& p, const Kernel& kernel,
                std::vector<Binding> bindings, const Kernel& combine,
                std::vector<Binding> combine_bindings, int64_t row_width, double work) {
  Split split{};
  const auto set_split = [&](AttentionParams& params) {
    params.num_splits = static_cast<int32_t>(split.num_splits);
    params.keys_per_split = static_cast<int32_t>(split.keys_per_split);
  };
  Status status = builder.Add(
      kernel, std::move(bindings), work,
      [&](const Variant& v, AttentionParams& params, int64_t& x, int64_t& y, int64_t& z) {
        split = SplitKeys(p, builder.inner_batch(), v.block_kv);
        set_split(params);
        x = CeilDiv(split.num_splits, v.num_simdgroups);
        y = p.num_kv_heads * CeilDiv(p.q_len * params.num_groups, 8);
        z = builder.inner_batch();
      });
  if (!status.ok()) return status;
  status = builder.Add(
      combine, std::move(combine_bindings), 0,
      [&](const Variant& v, AttentionParams& params, int64_t& x, int64_t& y, int64_t& z) {
        set_split(params);
        x = CeilDiv(builder.inner_rows(), v.num_simdgroups);
        y = z = 1;
      });
  plan.partial_bytes = split.num_splits * builder.inner_rows() * row_width * 4;
  plan.partial_softmax_bytes = split.num_splits * builder.inner_rows() * 8;
  return status;
}

// Which blocks of the mask hide everything, for the kernels after it.
Status AddMaskBlocks(PlanBuilder& builder, Plan& plan, const AttentionProblem& p) {
  if (!p.mask.is_given || p.q_len == 0 || p.kv_len == 0) return {};
  const int64_t num_pairs = builder.NumPairs(builder.params().mask);
  plan.mask_blocks_bytes = num_pairs * builder.mask_rows() * builder.mask_cols();
  return builder.Add(
      kMaskBlocks,
      {{JFM_BUFFER_MASK, Operand::kMask}, {JFM_BUFFER_MASK_BLOCKS, Operand::kMaskBlocks}},
      BytesWork(plan.mask_blocks_bytes, builder.mask_block_bytes()),
      [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
        x = CeilDiv(builder.mask_cols(), v.num_simdgroups);
        y = builder.mask_rows();
        z = num_pairs;
      });
}

// Its work is that of rows with an ordinary logsumexp, which need no scores.
Status AddDelta(PlanBuilder& builder, Plan& plan, const AttentionProblem& p) {
  plan.delta_bytes = builder.inner_rows() * 8;
  return builder.AddQueryBlocks(
      kDelta,
      {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
       {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
       {JFM_BUFFER_OUT, Operand::kOut}, {JFM_BUFFER_DOUT, Operand::kDout},
       {JFM_BUFFER_DLOGSUMEXP, Operand::kDlogsumexp}, {JFM_BUFFER_DELTA, Operand::kDelta}},
      BytesWork(builder.inner_rows(), 2 * p.value_head_dim * SizeBytes(p.dtype)));
}

constexpr Binding kBackwardInputs[] = {
    {JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
    {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
    {JFM_BUFFER_DOUT, Operand::kDout},   {JFM_BUFFER_DELTA, Operand::kDelta}};

std::vector<Binding> BackwardBindings(std::initializer_list<Binding> results) {
  std::vector<Binding> bindings(std::begin(kBackwardInputs), std::end(kBackwardInputs));
  bindings.insert(bindings.end(), results);
  return bindings;
}

// A tile of the gradient of bias, or all of a slope's, per column of threadgroups, which
// share its sum as parts. `is_empty`: over nothing.
Status AddBiasGradient(PlanBuilder& builder, Plan& plan, const AttentionProblem& p,
                       bool is_empty) {
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
  Status status = builder.Add(
      kBiasGradient,
      BackwardBindings({{JFM_BUFFER_PARTIAL, Operand::kPartial},
                        {JFM_BUFFER_GRADIENT, Operand::kGradient}}),
      builder.PairWork(2 * (p.head_dim + p.value_head_dim)),  // S, dP
      [&](const Variant& v, AttentionParams& params, int64_t& x, int64_t& y, int64_t& z) {
        const int64_t row_blocks = CeilDiv(p.q_len, v.block_q);
        const int64_t col_blocks = CeilDiv(p.kv_len, v.block_kv);
        x = (sums_rows ? 1 : row_blocks) * (sums_cols ? 1 : col_blocks);
        z = num_kept;
        // Like the parts of SplitKeys a function of the shape alone.
        const int64_t num_blocks =
            num_summed * (sums_rows ? row_blocks : 1) * (sums_cols ? col_blocks : 1);
        if (x * z > 0 && num_blocks > 0) {
          const int64_t fitting = kMaxPartialBytes / (4 * num_elements);
          const int64_t most = std::min({kMaxParts, num_blocks, fitting});
          num_parts = std::clamp<int64_t>(kTargetThreadgroups / (x * z), 1,
                                          std::max<int64_t>(most, 1));
          blocks_per_part = CeilDiv(num_blocks, num_parts);
          num_parts = CeilDiv(num_blocks, blocks_per_part);
        }
        set_parts(params);
        y = num_parts;
      });
  if (!status.ok()) return status;
  if (std::max(num_summed, blocks_per_part) > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("the gradient of " + std::string(GradientName(p)) +
                           " would be a sum over more than 2^31 - 1 blocks of scores at once.");
  }
  if (num_parts == 1) return {};
  plan.partial_bytes = num_parts * num_elements * 4;
  return builder.Add(
      kBiasGradientCombine,
      {{JFM_BUFFER_PARTIAL, Operand::kPartial}, {JFM_BUFFER_GRADIENT, Operand::kGradient}}, 0,
      [&](const Variant& v, AttentionParams& params, int64_t& x, int64_t& y, int64_t& z) {
        set_parts(params);
        x = CeilDiv(num_elements, 32 * v.num_simdgroups);
        y = z = 1;
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
      [&](const Variant&, AttentionParams& params, int64_t& x, int64_t& y, int64_t& z) {
        params.num_summed =
            is_empty || num_kept == 0 ? 0 : static_cast<int32_t>(pairs / num_kept);
        x = y = 1;
        z = num_kept;
      });
}

Result<Plan> PlanForward(const AttentionProblem& p) {
  if (Status status = CheckLimits(p); !status.ok()) return status;
  Plan plan;
  if (NumRows(p) == 0) return plan;
  PlanBuilder builder(p, kForwardPass);
  if (Status status = AddMaskBlocks(builder, plan, p); !status.ok()) return status;
  const double work = builder.PairWork(2 * (p.head_dim + p.value_head_dim));  // S and O
  Status status;
  if (p.q_len <= kShortQuery) {
    status = AddSplit(builder, plan, p, kShortForward,
                      {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
                       {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_SOFTMAX, Operand::kPartialSoftmax}},
                      kShortForwardCombine,
                      {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_SOFTMAX, Operand::kPartialSoftmax},
                       {JFM_BUFFER_OUT, Operand::kOut},
                       {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
                      p.value_head_dim, work);
  } else {
    status = builder.AddQueryBlocks(
        kForward,
        {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
         {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_OUT, Operand::kOut},
         {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
        work);
  }
  if (!status.ok()) return status;
  plan.launches = builder.Finish();
  return plan;
}

Result<Plan> PlanBackward(const AttentionProblem& p) {
  if (Status status = CheckLimits(p); !status.ok()) return status;
  Plan plan;
  PlanBuilder builder(p, kBackwardPass);
  if (builder.inner_batch() == 0) return plan;
  const double dq_work = builder.PairWork(4 * p.head_dim + 2 * p.value_head_dim);  // S, dP, dQ
  Status status = AddMaskBlocks(builder, plan, p);
  if (!status.ok()) return status;
  if (p.q_len > 0) {
    status = AddDelta(builder, plan, p);
    if (!status.ok()) return status;
    if (p.q_len <= kShortQuery) {
      status = AddSplit(builder, plan, p, kShortDq,
                        BackwardBindings({{JFM_BUFFER_PARTIAL, Operand::kPartial}}),
                        kShortDqCombine,
                        {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                         {JFM_BUFFER_DQUERY, Operand::kDquery}},
                        p.head_dim, dq_work);
      plan.partial_softmax_bytes = 0;
    } else {
      status = builder.AddQueryBlocks(
          kBackwardDq, BackwardBindings({{JFM_BUFFER_DQUERY, Operand::kDquery}}), dq_work);
    }
    if (!status.ok()) return status;
  }
  status = builder.Add(
      kBackwardDkv,
      BackwardBindings(
          {{JFM_BUFFER_DKEY, Operand::kDkey}, {JFM_BUFFER_DVALUE, Operand::kDvalue}}),
      builder.PairWork(4 * (p.head_dim + p.value_head_dim)),  // S, dP, dV, dK
      [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
        x = CeilDiv(p.kv_len, v.block_kv);
        y = p.num_kv_heads;
        z = builder.inner_batch();
      });
  if (!status.ok()) return status;
  plan.launches = builder.Finish();
  return plan;
}

Result<Plan> PlanGradient(const AttentionProblem& problem) {
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
  Plan plan;
  PlanBuilder builder(p, kGradientPass);
  if (builder.IsSharedOverOuter(Operand::kGradient)) {
    return InvalidArgument("the gradient of " + std::string(GradientName(p)) +
                           " cannot be summed over outer batch dimensions of a call with more "
                           "than " + std::to_string(JFM_MAX_BATCH_DIMS) + " of them, but got " +
                           "batch sizes [" + ListText(problem.batch_sizes) + "].");
  }
  const bool is_sinks = p.gradient_of == GradientOf::kSinks;
  Status status;
  if (!is_empty) {
    status = AddMaskBlocks(builder, plan, p);
    if (status.ok()) status = AddDelta(builder, plan, p);
    if (!status.ok()) return status;
  }
  status = is_sinks ? AddSinksGradient(builder, p, is_empty)
                    : AddBiasGradient(builder, plan, p, is_empty);
  if (!status.ok()) return status;
  plan.launches = builder.Finish();
  return plan;
}

// ---- what operands and options need of each other

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

const Pass kForwardPass = {Operand::kDropoutHeadIndices, Operand::kOut, Operand::kLogsumexp,
                           PlanForward};
const Pass kBackwardPass = {Operand::kDlogsumexp, Operand::kDquery, Operand::kDvalue,
                            PlanBackward};
const Pass kGradientPass = {Operand::kDlogsumexp, Operand::kGradient, Operand::kGradient,
                            PlanGradient};

std::vector<size_t> Pass::Tensors(const AttentionProblem& problem) const {
  std::vector<size_t> tensors;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    if (IsResult(i) || (i <= Index(last_operand) && IsGiven(i, problem))) tensors.push_back(i);
  }
  return tensors;
}

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

void SetMaxLaunchWork(double operations) {
  max_launch_work.store(operations > 0 ? operations : kMaxWorkAtOnce,
                        std::memory_order_relaxed);
}

}  // namespace jfm
