// Builds the launches of a pass one by one: batch dimensions, parameters, function constants,
// bindings and grids, which are the same business for every kernel.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plugin/attention/plan.h"
#include "plugin/attention/planner.h"
#include "plugin/attention/problem.h"
#include "plugin/status.h"

namespace jfm {

constexpr int64_t kTargetSimdgroups = 1024;  // enough to fill the largest GPU (M3 Ultra: 80 cores)
constexpr int64_t kMaxPartialBytes = int64_t{16} << 20;  // where it is the planner's to choose
constexpr int64_t kDeltaNumbers = 4;  // float32, of a row of delta: see attention_delta.metal

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The work of a launch that little more than reads: a GPU computes some 32 operations in the
// time that a byte takes (the 7-core M1: 2.3 TFLOP/s, 68 GB/s).
inline double BytesWork(int64_t count, int64_t bytes_each) {
  return 32.0 * static_cast<double>(count) * static_cast<double>(bytes_each);
}

// What a kernel's pipeline depends on. Constants that it does not depend on are 0, so that
// calls which differ in nothing else share the pipeline.
enum Use : unsigned {
  kWidths = 1,    // the head_dims, and its rows of the table are by dtype
  kScores = 2,    // who sees whom: all operands of the scores, tiles
  kSinks = 4,
  kGradient = 8,  // what the gradient is of and how it is summed
  kUnit = 16,     // the unit of the scores, which bias, slopes and softcap change
  kWrites = 32,   // what else it writes, or instead: partial sums, the score gradient
};
struct Kernel {
  const char* name;
  unsigned uses;
};

// The threadgroups of a launch: `size` of them from `first` on, of a grid that may be larger.
struct Grid {
  std::array<int64_t, 3> size, first = {};
};

class PlanBuilder {
 public:
  // The launches that are added are those for one index of the outer batch dimensions, which
  // the kernels cannot address. The arguments must outlive it.
  PlanBuilder(const AttentionProblem& problem, const Pass& pass, const PlanContext& context);

  const AttentionParams& params() const { return params_; }
  const PlanContext& context() const { return context_; }
  const Choice* choice() const { return choice_; }  // null: the defaults
  void set_form(Form form) { plan_.form = form; }
  int64_t inner_batch() const { return inner_batch_; }
  int64_t inner_rows() const { return inner_batch_ * p_.num_heads * p_.q_len; }

  // Blocks of the mask, one along an axis over which it is shared; and bytes of each.
  int64_t mask_rows() const;
  int64_t mask_cols() const;
  int64_t mask_block_bytes() const;

  // Pairs of an inner batch index and a head that have elements of their own.
  int64_t NumPairs(const TensorStrides& strides) const;

  // Whether a tensor is shared over a batch dimension that the kernels cannot address.
  bool IsSharedOverOuter(Operand operand) const;

  // The work of all launches together with so many operations per visible pair of query and key.
  double PairWork(int64_t operations) const;

  // The row that a kernel takes for the problem: as measured, or the default.
  Result<const Variant*> Choose(const Kernel& kernel) const;

  // `grid` says the threadgroups, from the variant's blocks, and completes the parameters;
  // without threadgroups there is no launch. Operands that the kernel uses by its kind are
  // bound beside `bindings`.
  using MakeGrid = std::function<Grid(const Variant&, AttentionParams&)>;
  Status Add(const Kernel& kernel, std::vector<Binding> bindings, double work,
             const MakeGrid& grid);

  // A threadgroup per block of queries, head and batch index.
  Status AddQueryBlocks(const Kernel& kernel, std::vector<Binding> bindings, double work);

  // At least so much of it; launches that do not overlap in what they keep there share it.
  void NeedScratch(Operand operand, int64_t bytes);

  // The launches for every index of the outer batch dimensions, each cut into parts that are
  // not too long.
  Plan Finish();

 private:
  // Batch dimensions after dropping those of size 1 and merging neighbours that every
  // operand walks with one stride.
  void CollapseBatchDims();
  void SetParams();
  void AddIfGiven(const Binding& binding, std::vector<Binding>& bindings) const;
  void MakeDense(TensorStrides& strides, int64_t pair_size, const TensorStrides* like) const;
  std::vector<FunctionConstant> MakeConstants(const Kernel& kernel, const Variant& v,
                                              const AttentionParams& params) const;
  int64_t NumOuter() const;

  const AttentionProblem& p_;
  const PlanContext& context_;
  const Choice* choice_ = nullptr;
  std::vector<size_t> tensors_;                // of the pass
  std::vector<int64_t> batch_sizes_;           // collapsed
  std::vector<std::vector<int64_t>> strides_;  // [batch dimension][tensor of the pass]
  size_t num_outer_ = 0;
  int64_t inner_batch_ = 1;
  AttentionParams params_;
  Plan plan_;
};

}  // namespace jfm
