// The CPU kernels of one instruction set. Each kernels_*.cc compiles the same source for
// another one; isa.h chooses at run time.
#pragma once

#include <cstddef>

#include "plugin/cpu/problem.h"
#include "plugin/cpu/workers.h"

namespace jfm::cpu {

enum class Outcome { kOk, kOutOfMemory };

struct Kernels {
  const char* name;  // of the instruction set: "plain", "neon", "avx2", "avx512", "avx512_bf16"
  // Problems that CheckHostProblem and CheckLimits have passed; batch sizes, q_len and kv_len may
  // be 0.
  Outcome (*forward)(const Problem&, Workers&);
  Outcome (*backward)(const Problem&, Workers&);
  Outcome (*gradient)(const Problem&, Workers&);
  // Floating-point operations per second of one thread in products of matrices in its L1
  // cache: the limit that benchmarks compare with. For float32, or bfloat16.
  double (*measure_peak)(Dtype);
};

extern const Kernels kPlainKernels;  // NEON on aarch64, else C++ for any machine of the target
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels;
#endif

}  // namespace jfm::cpu
