// constexpr alone does not put a variable in the constant space.
// expect: program-scope variable.*constant
#include <metal_stdlib>

using namespace metal;

constexpr int kRows = 3;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = float(kRows);
}
