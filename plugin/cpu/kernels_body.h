// The kernels for the instruction set JFM_ISA: what each kernels_*.cc is made of.
#pragma once

#include <time.h>

#include "plugin/cpu/backward.h"
#include "plugin/cpu/forward.h"
#include "plugin/cpu/gradient.h"
#include "plugin/cpu/kernels.h"

namespace jfm::cpu::JFM_ISA {
namespace {

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best of some runs: what the core does when nothing disturbs it.
template <class Product>
double MeasurePeakOf() {
  constexpr int64_t kRows = 16 * kTileRows, kDepth = 64, kRuns = 64, kSamples = 24;
  alignas(64) static float a[kRows * kDepth], b[kDepth * kTileCols];
  alignas(64) float c[kRows * kTileCols];
  double best = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    const double start = Now();
    for (int run = 0; run < kRuns; ++run) {
      Multiply<Product, false, Banded::kDepth>(c, kTileCols, {a, kDepth, 1}, b, kTileCols, kRows,
                                               kTileCols, kDepth * Product::kPerElement, {});
    }
    const double operations = 2.0 * kRows * kTileCols * kDepth * Product::kPerElement * kRuns;
    const double speed = operations / (Now() - start);
    if (speed > best) best = speed;
  }
  return best;
}

double MeasurePeak(Dtype dtype) {
#if defined(__AVX512BF16__)
  if (dtype == Dtype::kBfloat16) return MeasurePeakOf<Bfloat16Product>();
#endif
  (void)dtype;
  return MeasurePeakOf<Float32Product>();
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA

#define JFM_CPU_KERNELS(symbol, name)                                                   \
  namespace jfm::cpu {                                                                  \
  const Kernels symbol = {name, JFM_ISA::Forward, JFM_ISA::Backward, JFM_ISA::Gradient, \
                          JFM_ISA::MeasurePeak};                                        \
  }
