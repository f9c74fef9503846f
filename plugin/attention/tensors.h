// The tensors of a problem as one table: names, element types, dimensions. Read by everybody
// who checks, plans, binds or decodes them, so that an operand is one row and no code.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plugin/attention/problem.h"

namespace jfm {

enum class Element : uint8_t { kProblem, kBias, kFloat32, kInt32, kUint32, kBool };

struct ElementSpec {
  const char* name;
  int64_t size_bytes;
};
inline ElementSpec SpecOf(Dtype dtype) { return {Name(dtype), SizeBytes(dtype)}; }
inline ElementSpec SpecOf(Element element, const AttentionProblem& problem) {
  switch (element) {
    case Element::kProblem: return SpecOf(problem.dtype);
    case Element::kBias: return SpecOf(problem.bias_dtype);
    case Element::kFloat32: return {"float32", 4};
    case Element::kInt32: return {"int32", 4};
    case Element::kUint32: return {"uint32", 4};
    case Element::kBool: return {"bool", 1};
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
  const char* name;
  TensorView AttentionProblem::*view;
  Element element;
  size_t num_dims;
  DimSpec dims[3];
};

namespace dims {
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
}  // namespace dims

// In the order of the wire format and of Operand (planner.h). gradient has the row of the
// operand whose gradient it is, see SpecOfTensor.
inline constexpr std::array<TensorSpec, 23> kTensors = {{
    {"query", &AttentionProblem::query, Element::kProblem, 3,
     {dims::kQueries, dims::kHeads, dims::kWidth}},
    {"key", &AttentionProblem::key, Element::kProblem, 3,
     {dims::kKeys, dims::kKvHeads, dims::kWidth}},
    {"value", &AttentionProblem::value, Element::kProblem, 3,
     {dims::kKeys, dims::kKvHeads, dims::kValueWidth}},
    {"bias", &AttentionProblem::bias, Element::kBias, 3,
     {dims::kMaybeHeads, dims::kMaybeQueries, dims::kMaybeKeys}},
    {"mask", &AttentionProblem::mask, Element::kBool, 3,
     {dims::kMaybeHeads, dims::kMaybeQueries, dims::kMaybeKeys}},
    {"q_offset", &AttentionProblem::q_offsets, Element::kInt32, 0, {}},
    {"q_segment_ids", &AttentionProblem::q_segment_ids, Element::kInt32, 1, {dims::kQueries}},
    {"kv_segment_ids", &AttentionProblem::kv_segment_ids, Element::kInt32, 1, {dims::kKeys}},
    {"query_seq_lengths", &AttentionProblem::query_seq_lengths, Element::kInt32, 0, {}},
    {"key_value_seq_lengths", &AttentionProblem::key_value_seq_lengths, Element::kInt32, 0, {}},
    {"sinks", &AttentionProblem::sinks, Element::kFloat32, 1, {dims::kHeads}},
    {"alibi_slopes", &AttentionProblem::alibi_slopes, Element::kFloat32, 1, {dims::kHeads}},
    {"dropout_key", &AttentionProblem::dropout_key, Element::kUint32, 1, {dims::kKeyWords}},
    {"dropout_batch_indices", &AttentionProblem::dropout_batch_indices, Element::kInt32, 0, {}},
    {"dropout_head_indices", &AttentionProblem::dropout_head_indices, Element::kInt32, 1,
     {dims::kHeads}},
    {"out", &AttentionProblem::out, Element::kProblem, 3,
     {dims::kQueries, dims::kHeads, dims::kValueWidth}},
    {"logsumexp", &AttentionProblem::logsumexp, Element::kFloat32, 2,
     {dims::kHeads, dims::kQueries}},
    {"dout", &AttentionProblem::dout, Element::kProblem, 3,
     {dims::kQueries, dims::kHeads, dims::kValueWidth}},
    {"dlogsumexp", &AttentionProblem::dlogsumexp, Element::kFloat32, 2,
     {dims::kHeads, dims::kQueries}},
    {"dquery", &AttentionProblem::dquery, Element::kProblem, 3,
     {dims::kQueries, dims::kHeads, dims::kWidth}},
    {"dkey", &AttentionProblem::dkey, Element::kProblem, 3,
     {dims::kKeys, dims::kKvHeads, dims::kWidth}},
    {"dvalue", &AttentionProblem::dvalue, Element::kProblem, 3,
     {dims::kKeys, dims::kKvHeads, dims::kValueWidth}},
    {"gradient", &AttentionProblem::gradient, Element::kFloat32, 0, {}},
}};

// Every size of a problem, and the tensor (an index of kTensors) that it is read from
// when tensors come with shapes.
struct SizeSpec {
  const char* name;
  int64_t AttentionProblem::*size;
  int64_t min;
  size_t source;
};
inline constexpr std::array<SizeSpec, 6> kSizes = {{
    {"q_len", &AttentionProblem::q_len, 0, 0},
    {"kv_len", &AttentionProblem::kv_len, 0, 1},
    {"num_heads", &AttentionProblem::num_heads, 1, 0},
    {"num_kv_heads", &AttentionProblem::num_kv_heads, 1, 1},
    {"head_dim", &AttentionProblem::head_dim, 1, 0},
    {"value_head_dim", &AttentionProblem::value_head_dim, 1, 2},
}};

// The operands that a problem may be without: their bits in the masks of the wire format
// and the C ABI start at 0 with the first of them.
constexpr size_t kFirstOptional = 3;
constexpr size_t kNumOptional = 12;
constexpr size_t kGradientTensor = kTensors.size() - 1;

// Those that can have a gradient, in the order of GradientOf.
inline constexpr size_t kDifferentiable[] = {3, 10, 11};

inline size_t OperandOfGradient(const AttentionProblem& problem) {
  return kDifferentiable[static_cast<size_t>(problem.gradient_of)];
}

inline TensorSpec SpecOfTensor(size_t i, const AttentionProblem& problem) {
  if (i != kGradientTensor) return kTensors[i];
  TensorSpec spec = kTensors[OperandOfGradient(problem)];
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
