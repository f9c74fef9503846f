// From products q·k to scores and probabilities, and from dout·v to score gradients. One meaning
// for forward and backward; that of metal_kernels/attention_scores.h.
//
//   x = scale·(q·k) + bias - slope·|i + q_offset - j|;  x = cap·tanh(x / cap)
//   hidden: see masks.h, and by a bias of -inf
//
// Where only q·k enters a score ("plain"), it is in units of log2, which saves an operation; else
// in natural units: those of a bias of finfo.min would overflow.
#pragma once

#include "plugin/cpu/masks.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// Score units from natural units, and back.
JFM_CPU_INLINE float ToScoreUnits(const Head& head, float x) {
  return head.is_plain ? x * kLog2e : x;
}
JFM_CPU_INLINE float FromScoreUnits(const Head& head, float x) {
  return head.is_plain ? x * kLn2 : x;
}

// exp of a difference in score units.
JFM_CPU_INLINE float ExpOf(const Head& head, float x) {
  return Exp2(Broadcast(head.is_plain ? x : x * kLog2e))[0];
}

// Scores beyond this could overflow without large operands; see kLargeBits.
constexpr float kLargeScale = 0x1p18f;
JFM_CPU_INLINE bool HasLargeScale(const Head& head) { return !(head.scale < kLargeScale); }

// tanh, at most 2 units in the last place off. Below 0.625 by a minimax polynomial, with a relative
// error of 4e-9 before roundings; 1 - 2 / (e^2y + 1) would cancel there.
JFM_CPU_INLINE V Tanh(V y) {
  const U sign = BitsOf(y) & 0x80000000u;
  const V magnitude = FromBits(BitsOf(y) & 0x7fffffffu);
  const V square = y * y;
  V p = Broadcast(-0.005704985931515694f);
  p = Fma(p, square, Broadcast(0.02063908614218235f));
  p = Fma(p, square, Broadcast(-0.05373971536755562f));
  p = Fma(p, square, Broadcast(0.13331441581249237f));
  p = Fma(p, square, Broadcast(-0.3333328068256378f));
  const V small = Fma(y * square, p, y);
  const V power = Exp2(magnitude * Broadcast(2 * kLog2e));
  const V large = Broadcast(1.0f) - Broadcast(2.0f) / (power + Broadcast(1.0f));
  return Select((I)(magnitude < Broadcast(0.625f)), small, FromBits(BitsOf(large) | sign));
}

// ---- one row of a tile

struct Row {
  const Problem* problem;
  int32_t key_begin, key_end;  // as of Tile
  int64_t first, last;         // the whole vectors of it that are wanted, columns
  int64_t num_keys;
  const uint8_t* visible;  // of the row; may be null
  const uint8_t* kept;
  bool is_plain;
  V scale;
  const char* bias;  // at the tile's first key; may be null
  bool has_slopes;
  V slope;
  int64_t distance;  // i + q_offset - j of the tile's first key
  V cap, inverse_cap;
};

JFM_CPU_INLINE Row MakeRow(const Head& head, const Tile& tile, int64_t row, int64_t begin,
                           int64_t end) {
  const Problem& p = *head.problem;
  const int64_t query = tile.first_query + row;
  Row r;
  r.problem = &p;
  r.key_begin = tile.key_begin[row];
  r.key_end = tile.key_end[row];
  r.first = Clamp(r.key_begin / kWidth * kWidth, begin, end);
  r.last = Clamp(RoundUp(r.key_end, kWidth), r.first, end);
  r.num_keys = tile.num_keys;
  r.visible = tile.visible == nullptr ? nullptr : tile.visible + row * kBlockKeys;
  r.kept = tile.kept == nullptr ? nullptr : tile.kept + row * kBlockKeys;
  r.is_plain = head.is_plain;
  r.scale = Broadcast(head.score_scale);
  r.bias = head.bias;
  if (head.bias != nullptr) {
    r.bias += (p.bias_dtype == Dtype::kFloat32 ? 4 : 2) *
              (query * p.bias.row_stride + tile.first_key * p.bias.col_stride);
  }
  r.has_slopes = p.slopes.data != nullptr;
  r.slope = Broadcast(head.slope);
  r.distance = query + head.q_offset - tile.first_key;
  r.cap = Broadcast(p.soft_cap);
  // Finite for the smallest caps too: 0 times it is 0.
  const float inverse = 1.0f / p.soft_cap;
  r.inverse_cap = Broadcast(inverse < 3.4e38f ? inverse : 3.4e38f);
  return r;
}

// 0 or -1 of kWidth bytes.
JFM_CPU_INLINE I LoadBytes(const uint8_t* bytes) {
  return (I)(__builtin_convertvector(LoadAs<U8>(bytes), U) != 0u);
}

template <class T>
JFM_CPU_INLINE V LoadBiasAs(const Row& row, int64_t j) {
  const T* bias = reinterpret_cast<const T*>(row.bias);
  if (row.problem->bias.col_stride != 0) return LoadPart(bias, j, row.num_keys);
  T shared[kWidth];
  for (int k = 0; k < kWidth; ++k) shared[k] = *bias;
  return T::Load(shared);
}
JFM_CPU_INLINE V LoadBias(const Row& row, int64_t j) {
  switch (row.problem->bias_dtype) {
    case Dtype::kFloat32:
      return LoadBiasAs<Float32>(row, j);
    case Dtype::kFloat16:
      return LoadBiasAs<Float16>(row, j);
    case Dtype::kBfloat16:
      return LoadBiasAs<Bfloat16>(row, j);
  }
  __builtin_unreachable();
}

// |i + q_offset - j| of columns j …, each the exact number, rounded once.
JFM_CPU_INLINE V Distances(const Row& row, int64_t j) {
  const int64_t distance = row.distance - j;
  if (distance <= INT32_MAX && distance - kWidth >= INT32_MIN) {
    const I exact = static_cast<int32_t>(distance) - Lanes();
    return FromBits(BitsOf(__builtin_convertvector(exact, V)) & 0x7fffffffu);
  }
  float distances[kWidth];
  for (int k = 0; k < kWidth; ++k) {
    const int64_t exact = distance - k;
    distances[k] = static_cast<float>(exact < 0 ? -exact : exact);
  }
  return Load(distances);
}

// Of kWidth elements. A visible score that is infinite (of an infinite operand, or an overflow) is
// NaN: -inf would look hidden, and inf ends as NaN anyway.
struct Scores {
  V x;        // in score units
  I visible;  // by everything
  V tanh;     // with a softcap: of x / cap
};

JFM_CPU_INLINE Scores ScoresAt(const Row& row, int64_t j, V product) {
  Scores s;
  const I column = Lanes() + static_cast<int32_t>(j);
  s.visible = (I)(column >= row.key_begin) & (I)(column < row.key_end);
  if (row.visible != nullptr) s.visible &= LoadBytes(row.visible + j);
  const V nan = Broadcast(__builtin_nanf(""));
  s.tanh = V{};
  if (row.is_plain) {
    s.x = product * row.scale;
    s.x = Select(IsFinite(s.x), s.x, nan);
    return s;
  }
  if (row.bias != nullptr) {
    const V bias = LoadBias(row, j);
    s.visible &= (I)(BitsOf(bias) != 0xff800000u);
    s.x = Fma(product, row.scale, bias);
  } else {
    s.x = product * row.scale;
  }
  if (row.has_slopes) s.x = Fma(-row.slope, Distances(row, j), s.x);
  s.x = Select(IsFinite(s.x), s.x, nan);
  if (row.problem->soft_cap != 0.0f) {
    s.tanh = Select(IsFinite(s.x), Tanh(s.x * row.inverse_cap), nan);
    s.x = s.tanh * row.cap;
  }
  return s;
}

JFM_CPU_INLINE void Fill(float* x, int64_t begin, int64_t end, V value) {
  for (int64_t j = begin; j < end; j += kWidth) Store(x + j, value);
}

// The general functions for one row of a tile; `row` counts from the tile's first query. They
// work on the columns [begin, end), multiples of kWidth, which may be more than the row's range.

// In place, products -> scores in score units; -inf where hidden, NaN for a visible infinite one.
// Returns the largest per lane. Scores and probabilities of plain rows are bit by bit those of
// PlainRow (forward.h): whether a block takes the one way or the other must not show.
V ScoreRow(const Head& head, const Tile& tile, int64_t row, float* x, int64_t begin, int64_t end) {
  const Row r = MakeRow(head, tile, row, begin, end);
  const V hidden = Broadcast(-kInfinity);
  Fill(x, begin, r.first, hidden);
  Fill(x, r.last, end, hidden);
  V max = hidden;
  for (int64_t j = r.first; j < r.last; j += kWidth) {
    const Scores s = ScoresAt(r, j, Load(x + j));
    const V score = Select(s.visible, s.x, hidden);
    Store(x + j, score);
    max = Max(score, max);  // in this order: a NaN is not taken
  }
  return max;
}

// In place, scores -> (dropped) exp(x - max). Returns the sum per lane of undropped ones.
V ProbabilityRow(const Head& head, const Tile& tile, int64_t row, float* x, int64_t begin,
                 int64_t end, float max) {
  const Row r = MakeRow(head, tile, row, begin, end);
  const V shift = Broadcast(max);
  const V dropout_scale = Broadcast(r.problem->dropout_scale);
  Fill(x, begin, r.first, V{});
  Fill(x, r.last, end, V{});
  V sums[2] = {};  // even and odd vectors apart, as in PlainRow
  for (int64_t j = r.first; j < r.last; j += kWidth) {
    const V shifted = Load(x + j) - shift;
    V p = Exp2(r.is_plain ? shifted : shifted * Broadcast(kLog2e));
    sums[j / kWidth % 2] += p;
    if (r.kept != nullptr) p = Select(LoadBytes(r.kept + j), p * dropout_scale, V{});
    Store(x + j, p);
  }
  return sums[0] + sums[1];
}

// What the backward needs of a query: p = exp(x - logsumexp) * factor.
struct RowStatistics {
  float logsumexp;  // in score units; +inf for a row that sees nothing; NaN if delta is
  float delta;
  float factor;  // 1 but where a coarse logsumexp is replaced by the row's maximum
};

// float32 numbers beyond this are 2^-11 = 5e-4 apart and more: rounding a logsumexp there is an
// error of 1e-4 and more of every probability. At 1e9 (a padding bias on all keys) nothing is left
// of log(sum). The scores are as coarse, but they are what the forward took.
constexpr float kCoarse = 4096.0f;
JFM_CPU_INLINE bool IsCoarse(const Head& head, const RowStatistics& statistics) {
  const float limit = ToScoreUnits(head, kCoarse);
  return statistics.logsumexp > limit || statistics.logsumexp < -limit;
}

// In place: s from q·k to dropped P, dp from dout·v to dS = P ∘ (dropped dp - delta) ∘ dx/d(score
// before the softcap); both 0 where hidden, selected, so that no NaN gets there.
void GradientRow(const Head& head, const Tile& tile, int64_t row, const RowStatistics& statistics,
                 float* s, float* dp, int64_t begin, int64_t end) {
  Row r = MakeRow(head, tile, row, begin, end);
  if (statistics.logsumexp == kInfinity) r.first = r.last = begin;
  Fill(s, begin, r.first, V{});
  Fill(s, r.last, end, V{});
  Fill(dp, begin, r.first, V{});
  Fill(dp, r.last, end, V{});
  const V logsumexp = Broadcast(statistics.logsumexp);
  const V delta = Broadcast(statistics.delta), factor = Broadcast(statistics.factor);
  const V dropout_scale = Broadcast(r.problem->dropout_scale);
  const bool is_coarse = IsCoarse(head, statistics);
  const bool has_softcap = r.problem->soft_cap != 0.0f;
  for (int64_t j = r.first; j < r.last; j += kWidth) {
    const V product = Load(s + j);
    const Scores scores = ScoresAt(r, j, product);
    V shifted = scores.x - logsumexp;
    if (!r.is_plain) {
      shifted *= Broadcast(kLog2e);
    } else if (!is_coarse) {
      // One rounding less, which counts where scores are in the hundreds. A coarse logsumexp is
      // that of rounded scores, from which unrounded ones may be far.
      shifted = Select(IsNaN(scores.x), scores.x, Fma(product, r.scale, -logsumexp));
    }
    V p = Exp2(shifted) * factor;
    V gradient = Load(dp + j);
    V dropped = p;
    if (r.kept != nullptr) {
      const I kept = LoadBytes(r.kept + j);
      gradient = Select(kept, gradient * dropout_scale, V{});
      dropped = Select(kept, p * dropout_scale, V{});
    }
    gradient = p * (gradient - delta);
    if (has_softcap) gradient *= Broadcast(1.0f) - scores.tanh * scores.tanh;
    Store(s + j, Select(scores.visible, dropped, V{}));
    Store(dp + j, Select(scores.visible, gradient, V{}));
  }
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
