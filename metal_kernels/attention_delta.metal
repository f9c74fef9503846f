// delta = rowsum(dout ∘ out) - dlogsumexp, float32; one simdgroup per query row.
// NaN if dout holds a NaN or inf: the backward kernels work on sanitised dout, and this
// is how they learn which rows are not finite.
//
// Grid: x = block of NUM_SIMDGROUPS rows, y = query head, z = batch index.

#include "attention_common.h"

template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_delta(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* out [[buffer(JFM_BUFFER_OUT)]],
    device const T* dout [[buffer(JFM_BUFFER_DOUT)]],
    device const float* dlogsumexp [[buffer(JFM_BUFFER_DLOGSUMEXP)]],
    device float* delta [[buffer(JFM_BUFFER_DELTA)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const int head = int(group.y);
  const int row = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (row >= params.q_len) return;  // whole simdgroups leave; no barrier follows
  out += head_offset(params, params.out, group.z, head) + row * params.out.row;
  dout += head_offset(params, params.dout, group.z, head) + row * params.dout.row;
  dlogsumexp += head_offset(params, params.dlogsumexp, group.z, head);
  delta += head_offset(params, params.delta, group.z, head);

  float sum = 0.0f;
  for (int c = int(lane); c < value_head_dim; c += 32) {
    const float g = float(dout[c]);
    sum += is_finite_value(g) ? g * float(out[c]) : quiet_nan();
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    delta[row * params.delta.row] = sum - dlogsumexp[row * params.dlogsumexp.row];
  }
}
