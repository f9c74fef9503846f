// AttentionProblem and its memory to the plain struct of the kernels. The numbers that come from
// options are those of the planner, so that both backends drop and hide the same elements.
#include "plugin/cpu/problem.h"

#include <algorithm>
#include <array>

#include "plugin/attention/problem_checks.h"
#include "plugin/attention/tensors.h"
#include "plugin/cpu/attention.h"

namespace jfm::cpu {
namespace {

// Parallel to kTensors.
constexpr std::array<Tensor Problem::*, kTensors.size()> kMembers = {
    &Problem::query,         &Problem::key,
    &Problem::value,         &Problem::bias,
    &Problem::mask,          &Problem::q_offsets,
    &Problem::q_segment_ids, &Problem::kv_segment_ids,
    &Problem::query_lengths, &Problem::kv_lengths,
    &Problem::sinks,         &Problem::slopes,
    &Problem::dropout_key,   &Problem::dropout_batch,
    &Problem::dropout_head,  &Problem::out,
    &Problem::logsumexp,     &Problem::dout,
    &Problem::dlogsumexp,    &Problem::dquery,
    &Problem::dkey,          &Problem::dvalue,
    &Problem::gradient,
};

}  // namespace

Problem MakeProblem(const Pass& pass, const HostProblem& host) {
  const AttentionProblem& source = host.problem;
  const KernelOptions options = OptionsOf(source);
  Problem problem = {};
  problem.dtype = source.dtype;
  problem.bias_dtype = source.bias_dtype;
  problem.gradient_of = source.gradient_of;
  problem.num_batch_dims = static_cast<int32_t>(source.batch_sizes.size());
  problem.num_batches = 1;
  for (size_t i = 0; i < source.batch_sizes.size(); ++i) {
    problem.batch_sizes[i] = source.batch_sizes[i];
    problem.num_batches *= source.batch_sizes[i];
  }
  problem.q_len = source.q_len;
  problem.kv_len = source.kv_len;
  problem.num_heads = source.num_heads;
  problem.num_kv_heads = source.num_kv_heads;
  problem.num_groups = source.num_heads / source.num_kv_heads;
  problem.head_dim = source.head_dim;
  problem.value_head_dim = source.value_head_dim;
  problem.scale = source.scale;
  problem.is_causal = source.is_causal;
  problem.q_offset = options.q_offset;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.soft_cap = source.logits_soft_cap;
  problem.dropout_threshold = options.dropout_threshold;
  problem.dropout_scale = options.dropout_scale;
  for (size_t i : pass.Tensors(source)) {
    const TensorView& view = source.*kTensors[i].view;
    Tensor& tensor = problem.*kMembers[i];
    tensor.data = static_cast<char*>(host.memory[i].data);
    std::copy(view.batch_strides.begin(), view.batch_strides.end(), tensor.batch_strides);
    tensor.head_stride = view.head_stride;
    tensor.row_stride = view.row_stride;
    tensor.col_stride = view.col_stride;
  }
  return problem;
}

}  // namespace jfm::cpu
