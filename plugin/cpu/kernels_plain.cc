// The CPU kernels without flags: NEON on aarch64, what every machine of the target has elsewhere.
#define JFM_ISA plain
#include "plugin/cpu/kernels_body.h"

#if defined(__aarch64__)
JFM_CPU_KERNELS(kPlainKernels, "neon")
#else
JFM_CPU_KERNELS(kPlainKernels, "plain")
#endif
