// A kernel returns void.
// expect: kernel.*must return void
#include <metal_stdlib>

using namespace metal;

[[kernel]] float scale_rows(device float* rows [[buffer(0)]],
                            uint lane [[thread_index_in_simdgroup]]) {
  return rows[lane];
}
