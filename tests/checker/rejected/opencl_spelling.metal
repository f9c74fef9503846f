// OpenCL's address-space names are not Metal's.
// expect: '__global' is not available
#include <metal_stdlib>

using namespace metal;

float first(const __global float* row) { return row[0]; }

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = first(rows);
}
