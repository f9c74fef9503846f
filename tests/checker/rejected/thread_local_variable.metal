// Metal has no thread_local.
// expect: 'thread_local' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  thread_local int calls = 0;
  rows[lane] = float(calls);
}
