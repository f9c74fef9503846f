// Forward attention for short queries: split over the keys, then combine.

#include "attention_short.h"

// One simdgroup: 8 packed rows against one split of the keys. K and V go from device
// memory to registers, since no other simdgroup of the threadgroup reads the same keys.
// Writes out normalised within the split and its logsumexp in the log2 domain.
template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_short_forward(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const T* query [[buffer(JFM_BUFFER_QUERY)]],
    device const T* key [[buffer(JFM_BUFFER_KEY)]],
    device const T* value [[buffer(JFM_BUFFER_VALUE)]],
    device float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device float* partial_lse [[buffer(JFM_BUFFER_PARTIAL_LSE)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(BLOCK_Q == 8, "a simdgroup owns 8 packed rows");
  static_assert(BLOCK_KV % 8 == 0 && HEAD_DIM % 8 == 0, "fragments are 8x8");
  const uint3 group = whole_grid(params, position);
  constexpr int kKeyFragments = BLOCK_KV / 8;
  constexpr int kDimFragments = HEAD_DIM / 8;

  const int split = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  if (split >= params.num_splits) return;  // whole simdgroups leave; there are no barriers
  const int dim_fragments = (head_dim + 7) / 8;
  const int value_fragments = (value_head_dim + 7) / 8;
  const int row_blocks = num_row_blocks(params);
  const int kv_head = int(group.y) / row_blocks;
  const int col = fragment_col(lane);
  const PackedRow row =
      packed_row(params, kv_head, int(group.y) % row_blocks, fragment_row(lane), group.z);

  query += head_offset(params, params.query, group.z, row.head) + row.query * params.query.row;
  key += head_offset(params, params.key, group.z, kv_head);
  value += head_offset(params, params.value, group.z, kv_head);

  Fragment o[kDimFragments];
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) o[d] = zero_fragment();
  float m = JFM_MOST_NEGATIVE;
  float l = 0.0f;  // this lane's part of the row sum

  const int split_start = split * params.keys_per_split;
  const int split_end = min(
      split_start + params.keys_per_split, end_of_visible_keys(params, params.q_len - 1));
  for (int first_key = split_start; first_key < split_end; first_key += BLOCK_KV) {
    Fragment s[kKeyFragments];
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) s[j] = zero_fragment();
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < dim_fragments) {
        Fragment a = load_row_fragment(query, row.valid, d * 8 + col, head_dim);
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = load_fragment_transposed(
              key, params.key.row, d * 8 + fragment_row(lane), first_key + j * 8 + col,
              params.kv_len, head_dim);
          simdgroup_multiply_accumulate(s[j], a, b, s[j]);
        }
      }
    }

    float block_max = -INFINITY;
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const int key_index = first_key + j * 8 + col + e;
        const bool visible = is_visible(params, row.query, key_index);
        const float x = visible ? s[j].thread_elements()[e] * params.scale_log2 : -INFINITY;
        s[j].thread_elements()[e] = x;
        block_max = max(block_max, x);
      }
    }
    const float new_m = max(m, row_max(block_max));
    const float correction = exp2(m - new_m);
    m = new_m;
    l *= correction;
    JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
      JFM_UNROLL for (int e = 0; e < 2; ++e) {
        const float p = exp2(s[j].thread_elements()[e] - m);
        s[j].thread_elements()[e] = p;
        l += p;
      }
    }

    bool found = false;
    JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
      if (d < value_fragments) {
        o[d].thread_elements()[0] *= correction;
        o[d].thread_elements()[1] *= correction;
        JFM_UNROLL for (int j = 0; j < kKeyFragments; ++j) {
          Fragment b = load_fragment(
              value, params.value.row, first_key + j * 8 + fragment_row(lane), d * 8 + col,
              params.kv_len, value_head_dim);
          found = sanitize(b) || found;
          simdgroup_multiply_accumulate(o[d], s[j], b, o[d]);
        }
      }
    }
    if (simd_any(found)) {  // rare: a row that sees such a value becomes NaN
      for (int j = 0; j < BLOCK_KV; ++j) {
        const int key_index = first_key + j;
        if (key_index < params.kv_len && is_visible(params, row.query, key_index) &&
            !row_is_finite(value + key_index * params.value.row, value_head_dim)) {
          l = quiet_nan();
        }
      }
    }
  }

  l = row_sum(l);
  if (!row.valid) return;
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  const long partial_index = split * num_partial_rows(params) + row.index;
  JFM_UNROLL for (int d = 0; d < kDimFragments; ++d) {
    if (d < value_fragments) {
      store_partial(
          o[d], inverse, partial + partial_index * value_head_dim, d * 8 + col, value_head_dim);
    }
  }
  if (col == 0) partial_lse[partial_index] = l == 0.0f ? -INFINITY : m + log2(l);
}

// Merges the splits of one row per simdgroup: out = Σ_s w_s out_s / Σ_s w_s with
// w_s = exp2(lse_s - max lse).
//
// Grid: x = block of NUM_SIMDGROUPS rows.
template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int NUM_SIMDGROUPS>
[[kernel]] void attention_short_forward_combine(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const float* partial [[buffer(JFM_BUFFER_PARTIAL)]],
    device const float* partial_lse [[buffer(JFM_BUFFER_PARTIAL_LSE)]],
    device T* out [[buffer(JFM_BUFFER_OUT)]],
    device float* logsumexp [[buffer(JFM_BUFFER_LOGSUMEXP)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint3 group = whole_grid(params, position);
  const long num_rows = num_partial_rows(params);
  const long row = long(group.x) * NUM_SIMDGROUPS + simdgroup;
  if (row >= num_rows) return;

  float m = JFM_MOST_NEGATIVE;
  for (int s = 0; s < params.num_splits; ++s) m = max(m, partial_lse[s * num_rows + row]);
  float l = 0.0f;
  for (int s = 0; s < params.num_splits; ++s) l += exp2(partial_lse[s * num_rows + row] - m);
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;

  device T* out_row = out + partial_row_offset(params, params.out, row);
  for (int c = int(lane); c < value_head_dim; c += 32) {
    float sum = 0.0f;
    for (int s = 0; s < params.num_splits; ++s) {
      const long index = s * num_rows + row;
      sum += exp2(partial_lse[index] - m) * partial[index * value_head_dim + c];
    }
    out_row[c] = T(sum * inverse);
  }
  if (lane == 0) {
    logsumexp[partial_row_offset(params, params.logsumexp, row)] =
        l == 0.0f ? -INFINITY : JFM_LN2 * (m + log2(l));
  }
}
