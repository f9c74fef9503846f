// The CPU kernels for x86-64-v4 with AVX512-BF16.
#define JFM_ISA avx512bf16
#include "plugin/cpu/kernels_body.h"

JFM_CPU_KERNELS(kAvx512Bf16Kernels, "avx512_bf16")
