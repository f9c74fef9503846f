// The CPU kernels for AVX2 and FMA.
#define JFM_ISA avx2
#include "plugin/cpu/kernels_body.h"

JFM_CPU_KERNELS(kAvx2Kernels, "avx2")
