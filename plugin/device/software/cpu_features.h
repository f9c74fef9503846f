// What this CPU has beyond the baseline that the library is built for. Own CPUID code:
// __builtin_cpu_supports does not link into a shared library under zig.
#pragma once

namespace jfm {

// AVX2, FMA and F16C, with the operating system saving the registers.
bool CpuHasAvx2FmaF16c();

}  // namespace jfm
