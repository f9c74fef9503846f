// The CPU kernels for x86-64-v4.
#define JFM_ISA avx512
#include "plugin/cpu/kernels_body.h"

JFM_CPU_KERNELS(kAvx512Kernels, "avx512")
