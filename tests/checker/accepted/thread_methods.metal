// Methods on thread objects, with and without the qualifier; thread references.
#include <metal_stdlib>

using namespace metal;

struct RunningMax {
  float value;
  float get() const thread { return value; }
  void add(float x) { value = max(value, x); }
};

METAL_FUNC void update(thread RunningMax& state, thread const float* row, int count) {
  for (int i = 0; i < count; ++i) state.add(row[i]);
}

[[kernel]] void row_max(device const float* rows [[buffer(0)]],
                        device float* out [[buffer(1)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  float row[4] = {rows[lane], rows[lane + 32], rows[lane + 64], rows[lane + 96]};
  RunningMax state;
  state.value = row[0];
  update(state, row, 4);
  out[lane] = state.get();
}
