// Steps that several passes have: launches with the scratch that they leave for later ones.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "plugin/attention/plan_builder.h"

namespace jfm {

// Which blocks of the mask hide everything, for the kernels after it.
Status AddMaskBlocks(PlanBuilder& builder, const AttentionProblem& problem);

// The numbers of a row that the kernels of the backward pass and of gradients start from.
Status AddDelta(PlanBuilder& builder, const AttentionProblem& problem);

// A kernel that splits the keys between simdgroups, and the kernel that combines its partial rows
// of `row_width` elements and, where it has them, statistics of a row.
Status AddSplit(PlanBuilder& builder, const AttentionProblem& problem, const Kernel& kernel,
                std::vector<Binding> bindings, const Kernel& combine,
                std::vector<Binding> combine_bindings, int64_t row_width,
                int64_t num_statistics, double work);

// The inputs of the kernels that recompute dS, then `results`.
std::vector<Binding> BackwardBindings(std::initializer_list<Binding> results);

}  // namespace jfm
