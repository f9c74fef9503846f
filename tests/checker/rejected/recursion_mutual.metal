// Two functions call each other.
// expect: recursion
#include <metal_stdlib>

using namespace metal;

int odd(int n);
int even(int n) { return n == 0 ? 1 : odd(n - 1); }
int odd(int n) { return n == 0 ? 0 : even(n - 1); }

[[kernel]] void parities(device int* rows [[buffer(0)]],
                         uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = even(rows[lane]);
}
