// Metal has no run-time type information.
// expect: 'typeid' is not available
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = typeid(rows[lane]) == typeid(float) ? 1.0f : 0.0f;
}
