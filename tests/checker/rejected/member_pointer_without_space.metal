// A struct member pointer names no address space.
// expect: pointer or reference without an address space
#include <metal_stdlib>

using namespace metal;

struct Tile {
  float* data;
};

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = float(sizeof(Tile));
}
