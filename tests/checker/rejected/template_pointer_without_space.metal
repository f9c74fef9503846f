// The missing address space hides behind a template parameter.
// expect: pointer or reference without an address space
#include <metal_stdlib>

using namespace metal;

template <typename T>
T first(const T* row) {
  return row[0];
}

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  float row[2] = {rows[lane], 0.0f};
  rows[lane] = first(row);
}
