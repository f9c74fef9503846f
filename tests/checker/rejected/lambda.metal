// Lambdas need a later Metal than 3.1.
// expect: lambda
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  auto twice = [](float x) { return 2.0f * x; };
  rows[lane] = twice(rows[lane]);
}
