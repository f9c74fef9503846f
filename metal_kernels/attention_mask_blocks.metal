// Which blocks of the mask hide everything: 1 per block of JFM_MASK_BLOCK x JFM_MASK_BLOCK
// elements that has an element which is not 0, else 0. The other kernels skip by it.
//
// Grid: x = block of NUM_SIMDGROUPS columns of blocks, y = row of blocks,
//       z = pair of those (batch, head) that the mask walks. One simdgroup per block.

#include "attention_common.h"

JFM_VARIANT_TEMPLATE
[[kernel]] void attention_mask_blocks(
    constant AttentionParams& params [[buffer(JFM_BUFFER_PARAMS)]],
    device const uchar* mask [[buffer(JFM_BUFFER_MASK)]],
    device uchar* mask_blocks [[buffer(JFM_BUFFER_MASK_BLOCKS)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(JFM_MASK_BLOCK == 32, "a lane reads one column of a block");
  const uint3 group = whole_grid(params, position);
  const int block_row = int(group.y);
  const int block_col = int(group.x) * NUM_SIMDGROUPS + int(simdgroup);
  const int num_rows = params.mask.row == 0 ? 1 : params.q_len;
  const int num_cols = params.mask_col == 0 ? 1 : params.kv_len;
  const int col = block_col * JFM_MASK_BLOCK + int(lane);
  if (col - int(lane) >= num_cols) return;  // whole simdgroups leave; there are no barriers

  const BatchHead pair = nth_pair(params, params.mask, true, group.z);
  mask += head_offset(params, params.mask, pair.batch, pair.head);
  mask_blocks += head_offset(params, params.mask_blocks, pair.batch, pair.head);
  const int first_row = block_row * JFM_MASK_BLOCK;
  bool sees = false;
  for (int row = first_row; row < min(first_row + JFM_MASK_BLOCK, num_rows); ++row) {
    if (col < num_cols) sees = sees || mask[row * params.mask.row + col] != 0;
  }
  const bool any = simd_any(sees);
  if (lane == 0) mask_blocks[block_row * params.mask_blocks.row + block_col] = any ? 1 : 0;
}
