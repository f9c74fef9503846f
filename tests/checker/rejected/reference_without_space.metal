// A helper's reference parameter names no address space.
// expect: pointer or reference without an address space
#include <metal_stdlib>

using namespace metal;

void double_it(float& value) { value += value; }

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float row = rows[lane];
  double_it(row);
  rows[lane] = row;
}
