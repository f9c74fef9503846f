// The tensors of a problem as one table: names, element types, dimensions. Read by everybody
// who checks, plans, binds or decodes them, so that an operand is one row and no code.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plugin/attention/problem.h"

namespace jfm {

// What a kernel's buffer index is bound to: the tensors in the order of kTensors, then scratch.
enum class Operand : uint8_t {
  kQuery, kKey, kValue,
  kBias, kMask, kQOffsets, kQSegmentIds, kKvSegmentIds, kQuerySeqLengths, kKeyValueSeqLengths,
  kSinks, kAlibiSlopes, kDropoutKey, kDropoutBatchIndices, kDropoutHeadIndices,
  kOut, kLogsumexp, kDout, kDlogsumexp, kDquery, kDkey, kDvalue, kGradient,
  kDelta, kPartial, kPartialSoftmax, kMaskBlocks, kScoreGradient, kPartialDvalue, kDquerySum,
};
constexpr size_t Index(Operand operand) { return static_cast<size_t>(operand); }
constexpr size_t kNumTensors = Index(Operand::kGradient) + 1;
constexpr size_t kNumOperands = Index(Operand::kDquerySum) + 1;
constexpr size_t kNumScratch = kNumOperands - kNumTensors;

// Names of the scratch, in the order of Operand.
inline constexpr std::array<const char*, kNumScratch> kScratchNames = {
    "delta",          "partial",        "partial_softmax", "mask_blocks",
    "score_gradient", "partial_dvalue", "dquery_sum"};

enum class Element : uint8_t { kProblem, kBias, kFloat32, kInt32, kUint32, kBool };

struct ElementSpec {
  const char* name;
  int64_t size_bytes;
};
inline ElementSpec SpecOf(Dtype dtype) { return {Name(dtype), SizeBytes(dtype)}; }
inline ElementSpec SpecOf(Element element, const AttentionProblem& problem) {
  switch (element) {
    case Element::kProblem:
      return SpecOf(problem.dtype);
    case Element::kBias:
      return SpecOf(problem.bias_dtype);
    case Element::kFloat32:
      return {"float32", 4};
    case Element::kInt32:
      return {"int32", 4};
    case Element::kUint32:
      return {"uint32", 4};
    case Element::kBool:
      return {"bool", 1};
  }
  __builtin_unreachable();
}

// A dimension after the batch dimensions.
struct DimSpec {
  const char* name;
  int64_t AttentionProblem::*size;  // null: fixed_size
  int64_t TensorView::*stride;      // null: dense
  bool may_be_shared = false;       // its size may be 1 where the problem's is not
  int64_t fixed_size = 0;

  int64_t Size(const AttentionProblem& problem) const {
    return size != nullptr ? problem.*size : fixed_size;
  }
};

// Where a tensor stands in AttentionProblem, and what it is made of.
struct TensorSpec {
  Operand operand;
  const char* name;
  TensorView AttentionProblem::*view;
  Element element;
  size_t num_dims;
  DimSpec dims[3];
};

// The rows of kTensors, in short.
namespace table {
using O = Operand;
using P = AttentionProblem;
using V = TensorView;
inline constexpr DimSpec kQueries = {"q_len", &P::q_len, &V::row_stride};
inline constexpr DimSpec kKeys = {"kv_len", &P::kv_len, &V::row_stride};
inline constexpr DimSpec kHeads = {"num_heads", &P::num_heads, &V::head_stride};
inline constexpr DimSpec kKvHeads = {"num_kv_heads", &P::num_kv_heads, &V::head_stride};
inline constexpr DimSpec kWidth = {"head_dim", &P::head_dim, nullptr};
inline constexpr DimSpec kValueWidth = {"value_head_dim", &P::value_head_dim, nullptr};
inline constexpr DimSpec kMaybeHeads = {"num_heads", &P::num_heads, &V::head_stride, true};
inline constexpr DimSpec kMaybeQueries = {"q_len", &P::q_len, &V::row_stride, true};
inline constexpr DimSpec kMaybeKeys = {"kv_len", &P::kv_len, &V::col_stride, true};
inline constexpr DimSpec kKeyWords = {"2", nullptr, nullptr, false, 2};

// In the order of the wire format and of Operand. gradient has the row of the operand whose
// gradient it is, see SpecOfTensor.
inline constexpr std::array<TensorSpec, kNumTensors> kTensors = {{
    {O::kQuery, "query", &P::query, Element::kProblem, 3, {kQueries, kHeads, kWidth}},
    {O::kKey, "key", &P::key, Element::kProblem, 3, {kKeys, kKvHeads, kWidth}},
    {O::kValue, "value", &P::value, Element::kProblem, 3, {kKeys, kKvHeads, kValueWidth}},
    {O::kBias, "bias", &P::bias, Element::kBias, 3, {kMaybeHeads, kMaybeQueries, kMaybeKeys}},
    {O::kMask, "mask", &P::mask, Element::kBool, 3, {kMaybeHeads, kMaybeQueries, kMaybeKeys}},
    {O::kQOffsets, "q_offset", &P::q_offsets, Element::kInt32, 0, {}},
    {O::kQSegmentIds, "q_segment_ids", &P::q_segment_ids, Element::kInt32, 1, {kQueries}},
    {O::kKvSegmentIds, "kv_segment_ids", &P::kv_segment_ids, Element::kInt32, 1, {kKeys}},
    {O::kQuerySeqLengths, "query_seq_lengths", &P::query_seq_lengths, Element::kInt32, 0, {}},
    {O::kKeyValueSeqLengths, "key_value_seq_lengths", &P::key_value_seq_lengths,
     Element::kInt32, 0, {}},
    {O::kSinks, "sinks", &P::sinks, Element::kFloat32, 1, {kHeads}},
    {O::kAlibiSlopes, "alibi_slopes", &P::alibi_slopes, Element::kFloat32, 1, {kHeads}},
    {O::kDropoutKey, "dropout_key", &P::dropout_key, Element::kUint32, 1, {kKeyWords}},
    {O::kDropoutBatchIndices, "dropout_batch_indices", &P::dropout_batch_indices,
     Element::kInt32, 0, {}},
    {O::kDropoutHeadIndices, "dropout_head_indices", &P::dropout_head_indices,
     Element::kInt32, 1, {kHeads}},
    {O::kOut, "out", &P::out, Element::kProblem, 3, {kQueries, kHeads, kValueWidth}},
    {O::kLogsumexp, "logsumexp", &P::logsumexp, Element::kFloat32, 2, {kHeads, kQueries}},
    {O::kDout, "dout", &P::dout, Element::kProblem, 3, {kQueries, kHeads, kValueWidth}},
    {O::kDlogsumexp, "dlogsumexp", &P::dlogsumexp, Element::kFloat32, 2, {kHeads, kQueries}},
    {O::kDquery, "dquery", &P::dquery, Element::kProblem, 3, {kQueries, kHeads, kWidth}},
    {O::kDkey, "dkey", &P::dkey, Element::kProblem, 3, {kKeys, kKvHeads, kWidth}},
    {O::kDvalue, "dvalue", &P::dvalue, Element::kProblem, 3, {kKeys, kKvHeads, kValueWidth}},
    {O::kGradient, "gradient", &P::gradient, Element::kFloat32, 0, {}},
}};

constexpr bool IsInOrder() {
  for (size_t i = 0; i < kTensors.size(); ++i) {
    if (Index(kTensors[i].operand) != i) return false;
  }
  return true;
}
static_assert(IsInOrder(), "the rows of kTensors are in the order of Operand");
}  // namespace table
using table::kTensors;

inline const char* NameOf(Operand operand) {
  const size_t i = Index(operand);
  return i < kNumTensors ? kTensors[i].name : kScratchNames[i - kNumTensors];
}

// Every size of a problem, and the tensor that it is read from when tensors come with shapes.
struct SizeSpec {
  const char* name;
  int64_t AttentionProblem::*size;
  int64_t min;
  Operand source;
};
inline constexpr std::array<SizeSpec, 6> kSizes = {{
    {"q_len", &AttentionProblem::q_len, 0, Operand::kQuery},
    {"kv_len", &AttentionProblem::kv_len, 0, Operand::kKey},
    {"num_heads", &AttentionProblem::num_heads, 1, Operand::kQuery},
    {"num_kv_heads", &AttentionProblem::num_kv_heads, 1, Operand::kKey},
    {"head_dim", &AttentionProblem::head_dim, 1, Operand::kQuery},
    {"value_head_dim", &AttentionProblem::value_head_dim, 1, Operand::kValue},
}};

// The operands that a problem may be without: their bits in the masks of the wire format
// and the C ABI start at 0 with the first of them.
constexpr size_t kFirstOptional = Index(Operand::kBias);
constexpr size_t kNumOptional = Index(Operand::kDropoutHeadIndices) + 1 - kFirstOptional;
constexpr size_t kGradientTensor = Index(Operand::kGradient);

// Those that can have a gradient, in the order of GradientOf.
inline constexpr size_t kDifferentiable[] = {
    Index(Operand::kBias), Index(Operand::kSinks), Index(Operand::kAlibiSlopes)};

inline size_t OperandOfGradient(const AttentionProblem& problem) {
  return kDifferentiable[static_cast<size_t>(problem.gradient_of)];
}

// The row of a tensor; that of the gradient as the problem asks for it.
inline TensorSpec SpecOfTensor(size_t i, const AttentionProblem& problem) {
  if (i != kGradientTensor) return kTensors[i];
  TensorSpec spec = kTensors[OperandOfGradient(problem)];
  spec.operand = kTensors[i].operand;
  spec.name = kTensors[i].name;
  spec.view = kTensors[i].view;
  return spec;
}

// Bit i of the mask: the optional operand i is given.
inline void SetGiven(AttentionProblem& problem, int64_t mask) {
  for (size_t i = 0; i < kNumOptional; ++i) {
    (problem.*kTensors[kFirstOptional + i].view).is_given = (mask >> i & 1) != 0;
  }
}

inline bool IsOptional(size_t i) {
  return i >= kFirstOptional && i < kFirstOptional + kNumOptional;
}
inline bool IsGiven(size_t i, const AttentionProblem& problem) {
  return !IsOptional(i) || (problem.*kTensors[i].view).is_given;
}

}  // namespace jfm
