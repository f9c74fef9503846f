// A thread method is called on an object in device memory.
// expect: cannot initialize object parameter
#include <metal_stdlib>

using namespace metal;

struct Row {
  float value;
  float get() const thread { return value; }
};

[[kernel]] void read(device Row* in [[buffer(0)]], device float* out [[buffer(1)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = in[lane].get();
}
