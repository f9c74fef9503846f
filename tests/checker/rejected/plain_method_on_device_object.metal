// A method without a qualifier is a thread method.
// expect: method of a thread object|cannot initialize object parameter
#include <metal_stdlib>

using namespace metal;

struct Row {
  float value;
  float get() const { return value; }
};

[[kernel]] void read(device Row* in [[buffer(0)]], device float* out [[buffer(1)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = in[lane].get();
}
