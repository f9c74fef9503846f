// Fragment is a keyword, which says what a function is for.
// expect: 'fragment' is a keyword of MSL
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float fragment = rows[lane];
  rows[lane] = 2.0f * fragment;
}
