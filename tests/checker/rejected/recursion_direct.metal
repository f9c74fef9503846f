// A function calls itself.
// expect: recursion
#include <metal_stdlib>

using namespace metal;

int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }

[[kernel]] void factorials(device int* rows [[buffer(0)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  rows[lane] = factorial(rows[lane]);
}
