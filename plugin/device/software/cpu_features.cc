#include "plugin/device/software/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jfm {

bool CpuHasAvx2FmaF16c() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned needed = bit_OSXSAVE | bit_FMA | bit_F16C;
  if ((c & needed) != needed) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6) return false;  // XMM and YMM state
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
#else
  return false;
#endif
}

}  // namespace jfm
