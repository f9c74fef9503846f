// Vector constructors, swizzles, conversions and vector loads.
#include <metal_stdlib>

using namespace metal;

[[kernel]] void scale_rows(device half* rows [[buffer(0)]],
                           uint2 position [[thread_position_in_grid]]) {
  device half4* row = (device half4*)(rows + position.y * 64);
  float4 wide = float4(row[position.x]);
  const float2 pair = float2(wide.xy);
  wide = float4(pair, wide.z, 1.0f) * 2.0f + float4(0.5f);
  row[position.x] = half4(wide);
  rows[0] = half(dot(wide, float4(pair, pair)));
}
