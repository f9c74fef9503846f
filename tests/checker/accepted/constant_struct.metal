// Parameter structs in constant memory, passed on by reference.
#include <metal_stdlib>

using namespace metal;

struct Strides {
  long batch[4];
  long row;
};

struct Params {
  Strides query;
  int length;
  float scale;
};

METAL_FUNC long offset_of(constant Strides& strides, uint batch, int row) {
  return strides.batch[0] * long(batch) + strides.row * row;
}

[[kernel]] void scale_rows(constant Params& params [[buffer(0)]],
                           device float* rows [[buffer(1)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (int(lane) < params.length) {
    rows[offset_of(params.query, group.z, int(lane))] *= params.scale;
  }
}
