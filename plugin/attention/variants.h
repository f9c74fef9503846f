// The tables of metal_kernels/variants.toml, as the build makes them: which kernels there are,
// and which of them a GPU takes unless it was measured otherwise.
#pragma once

#include <cstdint>
#include <string>

#include "plugin/attention/problem.h"
#include "plugin/status.h"

namespace jfm {

// Where the matrix products of a kernel read their tiles from.
enum class Loads : uint8_t { kThreadgroup, kDevice };

// One row x dtype of the table of variants.
struct Variant {
  const char* kernel;
  Dtype dtype;
  int head_dim, block_q, block_kv, block_d, num_simdgroups;
  Loads loads;
  int roles;
  int min_family;   // the first Apple GPU family that it is the default of
  bool is_default;  // false: only by a measured choice
  const char* host_name;
};

// The variant that a GPU of the family takes: of the least head_dim that is large enough, the
// one for the newest family, the first one among equals.
Result<const Variant*> DefaultVariant(const std::string& kernel, Dtype dtype, int64_t head_dim,
                                      int gpu_family);

// By its host_name; null: there is none.
const Variant* FindVariant(const std::string& host_name);

// How a pass is computed, where there are several ways.
enum class Form : uint8_t {
  kNone,   // there is one way
  kShort,  // few queries: the keys are split
  kA,      // backward: dQ and dK, dV recompute the scores each; no scratch for them
  kB,      // backward: dK, dV leave the score gradient in scratch, of which dQ is a product
};
const char* Name(Form form);

// The form of the backward pass for more than a few queries, unless it was measured otherwise.
Form DefaultBackwardForm(const AttentionProblem& problem, int gpu_family);

}  // namespace jfm
