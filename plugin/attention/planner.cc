#include "plugin/attention/planner.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

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

std::atomic<double> max_launch_work{kMaxWorkAtOnce};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Result<const Variant*> FindVariant(const char* kernel, const AttentionProblem& p) {
  const int64_t head_dim = std::max(p.head_dim, p.value_head_dim);
  for (const Variant& v : kVariants) {
    if (std::strcmp(v.kernel, kernel) == 0 && v.dtype == p.dtype && v.head_dim >= head_dim) {
      return &v;
    }
  }
  return Internal(std::string("the variant table has no row of ") + kernel + " for " +
                  Name(p.dtype) + " and head_dim " + std::to_string(head_dim));
}

Status Check(const AttentionProblem& p) {
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
  if (p.num_heads % p.num_kv_heads != 0) {
    return InvalidArgument("num_heads must be a multiple of num_kv_heads, but got num_heads=" +
                           std::to_string(p.num_heads) + " and num_kv_heads=" +
                           std::to_string(p.num_kv_heads) + ".");
  }
  return {};
}

// The operands in the order of Operand, then the strides that the kernels see.
struct BatchOperand {
  Operand operand;
  const TensorView* view;
  TensorStrides AttentionParams::* strides;
};

std::vector<BatchOperand> Operands(const AttentionProblem& p, bool backward) {
  std::vector<BatchOperand> operands = {
      {Operand::kQuery, &p.query, &AttentionParams::query},
      {Operand::kKey, &p.key, &AttentionParams::key},
      {Operand::kValue, &p.value, &AttentionParams::value},
      {Operand::kOut, &p.out, &AttentionParams::out},
      {Operand::kLogsumexp, &p.logsumexp, &AttentionParams::logsumexp},
  };
  if (backward) {
    operands.insert(operands.end(), {
        {Operand::kDout, &p.dout, &AttentionParams::dout},
        {Operand::kDlogsumexp, &p.dlogsumexp, &AttentionParams::dlogsumexp},
        {Operand::kDquery, &p.dquery, &AttentionParams::dquery},
        {Operand::kDkey, &p.dkey, &AttentionParams::dkey},
        {Operand::kDvalue, &p.dvalue, &AttentionParams::dvalue},
    });
  }
  return operands;
}

// Batch dimensions after dropping those of size 1 and merging neighbours that every
// operand walks with one stride.
struct BatchDims {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // [dimension][operand]
};

BatchDims CollapseBatchDims(const AttentionProblem& p, const std::vector<BatchOperand>& operands) {
  BatchDims dims;
  for (size_t i = 0; i < p.batch_sizes.size(); ++i) {
    if (p.batch_sizes[i] == 1) continue;
    std::vector<int64_t> strides;
    for (const BatchOperand& o : operands) strides.push_back(o.view->batch_strides[i]);
    bool merge = !dims.sizes.empty();
    for (size_t k = 0; merge && k < operands.size(); ++k) {
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

AttentionParams MakeParams(const AttentionProblem& p) {
  AttentionParams params;
  std::memset(&params, 0, sizeof(params));
  params.num_heads = static_cast<int32_t>(p.num_heads);
  params.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  params.num_groups = static_cast<int32_t>(p.num_heads / p.num_kv_heads);
  params.q_len = static_cast<int32_t>(p.q_len);
  params.kv_len = static_cast<int32_t>(p.kv_len);
  // Beyond these limits every key is visible, or none: clamping keeps the sums in 32 bits.
  params.q_offset = static_cast<int32_t>(std::clamp(p.q_offset, -p.q_len, p.kv_len));
  params.scale = p.scale;
  params.scale_log2 = static_cast<float>(static_cast<double>(p.scale) * M_LOG2E);
  return params;
}

std::vector<FunctionConstant> MakeConstants(const AttentionProblem& p, const Variant& v) {
  const int32_t values[] = {p.is_causal, p.q_len % v.block_q == 0, p.kv_len % v.block_kv == 0,
                            static_cast<int32_t>(p.head_dim),
                            static_cast<int32_t>(p.value_head_dim)};
  std::vector<FunctionConstant> constants;
#define JFM_PUSH(type, name, index)                                                             \
  constants.push_back({index, sizeof(type) == 1 ? FunctionConstant::Type::kBool                 \
                                                : FunctionConstant::Type::kInt,                 \
                       values[index]});
  JFM_FUNCTION_CONSTANTS(JFM_PUSH)
#undef JFM_PUSH
  return constants;
}

int64_t NumRows(const AttentionProblem& p) {
  int64_t rows = p.num_heads * p.q_len;
  for (int64_t size : p.batch_sizes) rows *= size;
  return rows;
}

// Pairs of a query and a key that it sees, over all batches and heads. The blocks at the
// diagonal do a little more.
double NumVisiblePairs(const AttentionProblem& p) {
  const double rows = static_cast<double>(NumRows(p));
  const double kv_len = static_cast<double>(p.kv_len);
  if (!p.is_causal || p.q_len == 0) return rows * kv_len;
  // Row i sees i + q_offset + 1 keys, cut to 0 … kv_len: the mean of a clamped ramp.
  const auto integral = [&](double x) {
    return x <= 0 ? 0.0 : x >= kv_len ? kv_len * (x - kv_len / 2) : x * x / 2;
  };
  const double first = static_cast<double>(p.q_offset) + 0.5;
  const double q_len = static_cast<double>(p.q_len);
  return rows * (integral(first + q_len) - integral(first)) / q_len;
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
  PlanBuilder(const AttentionProblem& problem, bool backward)
      : p_(problem), operands_(Operands(problem, backward)),
        dims_(CollapseBatchDims(problem, operands_)), params_(MakeParams(problem)) {
    const size_t num_dims = dims_.sizes.size();
    num_outer_ = num_dims > JFM_MAX_BATCH_DIMS ? num_dims - JFM_MAX_BATCH_DIMS : 0;
    params_.num_batch_dims = static_cast<int32_t>(num_dims - num_outer_);
    for (size_t i = num_outer_; i < num_dims; ++i) {
      const size_t d = i - num_outer_;
      params_.batch_sizes[d] = static_cast<int32_t>(dims_.sizes[i]);
      inner_batch_ *= dims_.sizes[i];
      for (size_t k = 0; k < operands_.size(); ++k) {
        (params_.*operands_[k].strides).batch[d] = dims_.strides[i][k];
      }
    }
    for (const BatchOperand& o : operands_) {
      (params_.*o.strides).head = o.view->head_stride;
      (params_.*o.strides).row = o.view->row_stride;
    }
    // delta is dense over the inner batch dimensions.
    params_.delta.row = 1;
    params_.delta.head = p_.q_len;
    int64_t stride = p_.num_heads * p_.q_len;
    for (int d = params_.num_batch_dims - 1; d >= 0; --d) {
      params_.delta.batch[d] = stride;
      stride *= params_.batch_sizes[d];
    }
  }

  int64_t inner_batch() const { return inner_batch_; }
  int64_t inner_rows() const { return inner_batch_ * p_.num_heads * p_.q_len; }

  // `grid` sees the variant, because a grid counts its blocks. `pair_work`: operations per
  // visible pair of query and key.
  template <class Grid>
  Status Add(const char* kernel, std::vector<Binding> bindings, int64_t pair_work, Grid grid) {
    Result<const Variant*> variant = FindVariant(kernel, p_);
    if (!variant.ok()) return variant.status();
    const Variant& v = **variant;
    Launch launch{&v, MakeConstants(p_, v), std::move(bindings), params_, {}, {}, {}, 0};
    int64_t x, y, z;
    grid(v, launch.params, x, y, z);
    for (int64_t n : {x, y, z}) {
      if (n > std::numeric_limits<int32_t>::max()) {
        return InvalidArgument(std::string(kernel) + " would need a grid of " + std::to_string(x) +
                               " x " + std::to_string(y) + " x " + std::to_string(z) +
                               " threadgroups, which is more than 2^31 - 1 in one dimension.");
      }
    }
    launch.threadgroups = {static_cast<uint32_t>(x), static_cast<uint32_t>(y),
                           static_cast<uint32_t>(z)};
    launch.threads_per_threadgroup = {static_cast<uint32_t>(32 * v.num_simdgroups), 1, 1};
    launch.work = static_cast<double>(pair_work) * NumVisiblePairs(p_) / NumOuter();
    launches_.push_back(std::move(launch));
    return {};
  }

  // Repeats the launches for every index of the outer batch dimensions.
  std::vector<Launch> Finish() const {
    std::vector<Launch> all;
    const int64_t num_outer = NumOuter();
    for (int64_t index = 0; index < num_outer; ++index) {
      std::array<int64_t, 13> offsets{};
      int64_t rest = index;
      for (size_t i = num_outer_; i-- > 0;) {
        const int64_t position = rest % dims_.sizes[i];
        rest /= dims_.sizes[i];
        for (size_t k = 0; k < operands_.size(); ++k) {
          offsets[static_cast<size_t>(operands_[k].operand)] += position * dims_.strides[i][k];
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
  // Indices of the batch dimensions that the kernels cannot address.
  int64_t NumOuter() const {
    int64_t count = 1;
    for (size_t i = 0; i < num_outer_; ++i) count *= dims_.sizes[i];
    return count;
  }

  const AttentionProblem& p_;
  std::vector<BatchOperand> operands_;
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
Status AddSplit(PlanBuilder& builder, Plan& plan, const AttentionProblem& p, const char* kernel,
                std::vector<Binding> bindings, const char* combine,
                std::vector<Binding> combine_bindings, int64_t row_width, int64_t pair_work) {
  Split split{};
  const auto set_split = [&](AttentionParams& params) {
    params.num_splits = static_cast<int32_t>(split.num_splits);
    params.keys_per_split = static_cast<int32_t>(split.keys_per_split);
  };
  Status status = builder.Add(
      kernel, std::move(bindings), pair_work,
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
  plan.partial_lse_bytes = split.num_splits * builder.inner_rows() * 4;
  return status;
}

}  // namespace

void SetMaxLaunchWork(double operations) {
  max_launch_work.store(operations > 0 ? operations : kMaxWorkAtOnce,
                        std::memory_order_relaxed);
}

Result<Plan> PlanForward(const AttentionProblem& p) {
  if (Status status = Check(p); !status.ok()) return status;
  Plan plan;
  if (NumRows(p) == 0) return plan;
  PlanBuilder builder(p, /*backward=*/false);
  const int64_t forward_work = 2 * (p.head_dim + p.value_head_dim);  // S and O
  Status status;
  if (p.q_len <= kShortQuery) {
    status = AddSplit(builder, plan, p, "attention_short_forward",
                      {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
                       {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_LSE, Operand::kPartialLse}},
                      "attention_short_forward_combine",
                      {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                       {JFM_BUFFER_PARTIAL_LSE, Operand::kPartialLse},
                       {JFM_BUFFER_OUT, Operand::kOut},
                       {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
                      p.value_head_dim, forward_work);
  } else {
    status = builder.Add(
        "attention_forward",
        {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
         {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_OUT, Operand::kOut},
         {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp}},
        forward_work,
        [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
          x = CeilDiv(p.q_len, v.block_q);
          y = p.num_heads;
          z = builder.inner_batch();
        });
  }
  if (!status.ok()) return status;
  plan.launches = builder.Finish();
  return plan;
}

Result<Plan> PlanBackward(const AttentionProblem& p) {
  if (Status status = Check(p); !status.ok()) return status;
  Plan plan;
  PlanBuilder builder(p, /*backward=*/true);
  if (builder.inner_batch() == 0) return plan;
  const int64_t dq_work = 4 * p.head_dim + 2 * p.value_head_dim;  // S, dP, dQ
  Status status;
  if (p.q_len > 0) {
    plan.delta_bytes = builder.inner_rows() * 4;
    status = builder.Add(
        "attention_delta",
        {{JFM_BUFFER_OUT, Operand::kOut}, {JFM_BUFFER_DOUT, Operand::kDout},
         {JFM_BUFFER_DLOGSUMEXP, Operand::kDlogsumexp}, {JFM_BUFFER_DELTA, Operand::kDelta}},
        0,
        [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
          x = CeilDiv(p.q_len, v.block_q);
          y = p.num_heads;
          z = builder.inner_batch();
        });
    if (!status.ok()) return status;
    const std::vector<Binding> inputs = {
        {JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
        {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
        {JFM_BUFFER_DOUT, Operand::kDout}, {JFM_BUFFER_DELTA, Operand::kDelta}};
    std::vector<Binding> bindings = inputs;
    if (p.q_len <= kShortQuery) {
      bindings.push_back({JFM_BUFFER_PARTIAL, Operand::kPartial});
      status = AddSplit(builder, plan, p, "attention_short_dq", bindings,
                        "attention_short_dq_combine",
                        {{JFM_BUFFER_PARTIAL, Operand::kPartial},
                         {JFM_BUFFER_DQUERY, Operand::kDquery}},
                        p.head_dim, dq_work);
      plan.partial_lse_bytes = 0;
    } else {
      bindings.push_back({JFM_BUFFER_DQUERY, Operand::kDquery});
      status = builder.Add(
          "attention_backward_dq", bindings, dq_work,
          [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
            x = CeilDiv(p.q_len, v.block_q);
            y = p.num_heads;
            z = builder.inner_batch();
          });
    }
    if (!status.ok()) return status;
  }
  if (p.kv_len > 0) {
    status = builder.Add(
        "attention_backward_dkv",
        {{JFM_BUFFER_QUERY, Operand::kQuery}, {JFM_BUFFER_KEY, Operand::kKey},
         {JFM_BUFFER_VALUE, Operand::kValue}, {JFM_BUFFER_LOGSUMEXP, Operand::kLogsumexp},
         {JFM_BUFFER_DOUT, Operand::kDout}, {JFM_BUFFER_DELTA, Operand::kDelta},
         {JFM_BUFFER_DKEY, Operand::kDkey}, {JFM_BUFFER_DVALUE, Operand::kDvalue}},
        4 * (p.head_dim + p.value_head_dim),  // S, dP, dV, dK
        [&](const Variant& v, AttentionParams&, int64_t& x, int64_t& y, int64_t& z) {
          x = CeilDiv(p.kv_len, v.block_kv);
          y = p.num_kv_heads;
          z = builder.inner_batch();
        });
    if (!status.ok()) return status;
  }
  plan.launches = builder.Finish();
  return plan;
}

}  // namespace jfm
