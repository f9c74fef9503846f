// Function constants in the kernel and in a helper; a table in constant memory.
#include <metal_stdlib>

using namespace metal;

constant bool is_causal [[function_constant(0)]];
constant int head_dim [[function_constant(3)]];
constant float kMostNegative = -3.402823466e+38f;
constant int kTable[3] = {1, 2, 3};

METAL_FUNC bool is_visible(int query, int key) { return !is_causal || key <= query; }

[[kernel]] void mask(device float* rows [[buffer(0)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  for (int c = 0; c < head_dim; ++c) {
    if (!is_visible(int(lane), c)) rows[c] = kMostNegative + float(kTable[c % 3]);
  }
}
