// 36 000 bytes of threadgroup memory.
// expect: 36000 bytes of threadgroup memory
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[9000];
  tile[lane] = rows[lane];
  rows[lane] = tile[lane];
}
