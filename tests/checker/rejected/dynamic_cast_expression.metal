// Metal has no run-time type information.
// expect: 'dynamic_cast' is not available
#include <metal_stdlib>

using namespace metal;

struct Tile {
  int rows;
};

[[kernel]] void scale_rows(device float* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  Tile tile;
  thread Tile* same = dynamic_cast<thread Tile*>(&tile);
  rows[lane] = float(same->rows);
}
