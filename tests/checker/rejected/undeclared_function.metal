// A misspelt library function.
// expect: undeclared|no member
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = exp_2(rows[lane]);
}
