// Metal has no virtual functions.
// expect: 'virtual' is not available
#include <metal_stdlib>

using namespace metal;

struct Mask {
  virtual bool visible(int) const thread { return true; }
};

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  Mask mask;
  rows[lane] = mask.visible(3) ? 1.0f : 0.0f;
}
