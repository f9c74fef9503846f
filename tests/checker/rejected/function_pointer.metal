// Functions have no addresses outside visible function tables.
// expect: function pointer|pointers? to function
#include <metal_stdlib>

using namespace metal;

int twice(int n) { return 2 * n; }

[[kernel]] void apply(device int* rows [[buffer(0)]],
                      uint lane [[thread_index_in_simdgroup]]) {
  int (*function)(int) = twice;
  rows[lane] = function(rows[lane]);
}
