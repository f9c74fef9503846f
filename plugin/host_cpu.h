// What the CPU of this machine has beyond the baseline that the library is built for, and how
// much of it this process may use. Own CPUID code: __builtin_cpu_supports does not link into
// a shared library under zig.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#else
#include <thread>
#endif

namespace jfm {

// Instructions of the CPU whose registers the operating system saves.
struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C
  bool avx512 = false;       // all of x86-64-v4
  bool avx512_bf16 = false;  // and its bfloat16 products
};

inline CpuFeatures DetectCpuFeatures() {
  CpuFeatures features;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const unsigned c1 = c;
  if ((c1 & bit_OSXSAVE) == 0) return features;
  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const unsigned b7 = b, max_subleaf = a;
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // of XCR0
  constexpr unsigned kAvx2 = bit_AVX | bit_FMA | bit_F16C;
  features.avx2 =
      (saved & kYmm) == kYmm && (c1 & kAvx2) == kAvx2 && (b7 & bit_AVX2) != 0;
  constexpr unsigned kV3 = bit_BMI | bit_BMI2;
  constexpr unsigned kV4 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
  constexpr unsigned kLzcnt = 1u << 5;  // of leaf 0x80000001
  const bool has_lzcnt = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & kLzcnt) != 0;
  features.avx512 = features.avx2 && (saved & kZmm) == kZmm && (b7 & (kV3 | kV4)) == (kV3 | kV4) &&
                    (c1 & bit_MOVBE) != 0 && has_lzcnt;
  constexpr unsigned kBf16 = 1u << 5;  // of leaf 7, subleaf 1
  features.avx512_bf16 = features.avx512 && max_subleaf >= 1 &&
                         __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBf16) != 0;
#endif
  return features;
}

// "Intel(R) Xeon(R) ..."; where the CPU does not say, "CPU".
inline std::string CpuName() {
#if defined(__x86_64__)
  unsigned words[12] = {};
  bool is_given = true;
  for (unsigned i = 0; i < 3; ++i) {
    unsigned* w = words + 4 * i;
    is_given = is_given && __get_cpuid(0x80000002 + i, w, w + 1, w + 2, w + 3);
  }
  char text[sizeof(words) + 1] = {};
  std::memcpy(text, words, sizeof(words));
  const std::string name = text;
  const size_t first = name.find_first_not_of(' ');
  if (is_given && first != std::string::npos) {
    return name.substr(first, name.find_last_not_of(' ') - first + 1);
  }
#endif
  return "CPU";
}

// CPUs that this thread may run on, at least 1.
inline int NumCpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

}  // namespace jfm
