// An array length known only at run time.
// expect: array size is not a constant expression
#include <metal_stdlib>

using namespace metal;

[[kernel]] void sum(device float* rows [[buffer(0)]],
                    constant int& length [[buffer(1)]],
                    uint lane [[thread_index_in_simdgroup]]) {
  float row[length];
  row[0] = rows[lane];
  rows[lane] = row[0];
}
