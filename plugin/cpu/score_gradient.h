// What the passes that compute gradients share: tiles of probabilities and score gradients from
// products S = q·k and dP = dout·v,
//   P = exp(x - logsumexp) · factor
//   dS = P ∘ (dropped dP - delta) ∘ dx/d(score before the softcap)
// and before them the statistics of query rows,
//   delta = rowsum(dout ∘ out) - dlogsumexp
//   factor = 1 / Σ exp(x - maximum) where the logsumexp is coarse, with the maximum in its place
#pragma once

#include "plugin/cpu/forward.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// How tiles are cut. Depends on the shape only, and so does every sum's order.
struct TilePlan {
  int64_t block_queries, block_keys;
  int64_t num_query_blocks, num_key_blocks;
  int64_t tile_row;  // of S and dP, and of transposed blocks
  // Row lengths of packed blocks, elements: as left operands, and as right ones or results.
  int64_t row_width, value_row_width, width, value_width;
};

// Blocks that fit a second cache of 1 MB together with what is computed of them. With 128 keys in
// place of 256 the backward takes 2 to 3 % longer, with 64 keys 6 to 10 %; more queries make no
// difference (EPYC 9004, head_dim 64 and 128, L 1024 and 2048).
constexpr int64_t kMaxQueries = 96;
JFM_CPU_INLINE int64_t MaxKeys(const Problem& p) {
  return AtLeast(p.head_dim, p.value_head_dim) <= 128 ? 256 : 128;
}
constexpr int64_t kMinKeys = 64;

// The size of blocks of equal size, at least as many as that.
JFM_CPU_INLINE int64_t BlockSize(int64_t num_rows, int64_t num_blocks, int64_t unit) {
  return AtLeast(RoundUp(CeilDiv(num_rows, AtLeast(num_blocks, 1)), unit), unit);
}

// With about so many blocks of keys, if that does not make them too small or too large.
template <Form kForm>
TilePlan PlanTiles(const Problem& p, int64_t wanted_key_blocks) {
  TilePlan plan;
  plan.block_queries = BlockSize(p.q_len, CeilDiv(p.q_len, kMaxQueries), kTileRows);
  const int64_t num_key_blocks =
      AtLeast(AtMost(wanted_key_blocks, p.kv_len / kMinKeys), CeilDiv(p.kv_len, MaxKeys(p)));
  plan.block_keys = BlockSize(p.kv_len, num_key_blocks, kRowAlignment);
  plan.num_query_blocks = CeilDiv(p.q_len, plan.block_queries);
  plan.num_key_blocks = CeilDiv(p.kv_len, plan.block_keys);
  // Columns are walked, too: rows of a power of two would share few lines of the first cache.
  plan.tile_row = plan.block_keys + kWidth;
  plan.row_width = RoundUp(NumElements<kForm>(p.head_dim), kWidth);
  plan.value_row_width = RoundUp(NumElements<kForm>(p.value_head_dim), kWidth);
  plan.width = RoundUp(p.head_dim, kWidth);
  plan.value_width = RoundUp(p.value_head_dim, kWidth);
  return plan;
}

// One tile at a time: the memory of a worker. In kFloat32 a block as left operand is the same as
// one that is stacked.
struct TileScratch {
  float *query, *dout;  // rows
  float *key, *value;   // transposed
  float *s, *dp;        // [block_queries, tile_row]: products, then P and dS
  Tile* tile;
  TileMemory* memory;

  static TileScratch Carve(Carver& carver, const TilePlan& plan) {
    TileScratch t;
    t.query = carver.Take<float>(plan.block_queries * plan.row_width);
    t.dout = carver.Take<float>(plan.block_queries * plan.value_row_width);
    t.key = carver.Take<float>(plan.row_width * plan.tile_row);
    t.value = carver.Take<float>(plan.value_row_width * plan.tile_row);
    t.s = carver.Take<float>(plan.block_queries * plan.tile_row);
    t.dp = carver.Take<float>(plan.block_queries * plan.tile_row);
    t.tile = carver.Take<Tile>(1);
    t.memory = carver.Take<TileMemory>(1);
    return t;
  }
};

// Packs a block of keys and values, transposed. Returns whether keys are large.
template <class T, Form kForm>
bool PackKeys(const Problem& p, const TilePlan& plan, int64_t batch, int64_t kv_head,
              int64_t first_key, int64_t num_keys, const TileScratch& t) {
  Seen key_seen, value_seen;
  PackTransposed<kForm>(SourceOf<T>(p, p.key, batch, kv_head, first_key, num_keys, p.head_dim),
                        t.key, plan.tile_row, key_seen);
  PackTransposed<kForm>(
      SourceOf<T>(p, p.value, batch, kv_head, first_key, num_keys, p.value_head_dim), t.value,
      plan.tile_row, value_seen);
  return key_seen.any_large();
}

// Packs rows of query and dout. Returns which are large.
struct LargeQueries {
  bool query, dout;
};
template <class T, Form kForm>
LargeQueries PackQueries(const Problem& p, int64_t batch, int64_t head_index, int64_t first_query,
                         int64_t num_queries, const TileScratch& t) {
  Seen query_seen, dout_seen;
  PackRows<kForm>(SourceOf<T>(p, p.query, batch, head_index, first_query, num_queries, p.head_dim),
                  p.scale < 0, t.query, query_seen);
  PackRows<kForm>(
      SourceOf<T>(p, p.dout, batch, head_index, first_query, num_queries, p.value_head_dim), false,
      t.dout, dout_seen);
  return {query_seen.any_large(), dout_seen.any_large()};
}

// P and dS of a row of which nothing but a range decides, on whole vectors; 0 outside of it.
JFM_CPU_INLINE void PlainGradientRow(float scale, const RowStatistics& statistics, int64_t begin,
                                     int64_t end, float* s, float* dp) {
  const V factor = Broadcast(scale), shift = Broadcast(-statistics.logsumexp);
  const V delta = Broadcast(statistics.delta);
  const auto step = [&](int64_t j, bool is_part) __attribute__((always_inline)) {
    V p = Exp2(Fma(Load(s + j), factor, shift));
    V ds = p * (Load(dp + j) - delta);
    if (is_part) {
      const I column = Lanes() + static_cast<int32_t>(j);
      const I seen = (column >= static_cast<int32_t>(begin)) & (column < static_cast<int32_t>(end));
      p = Select(seen, p, V{});
      ds = Select(seen, ds, V{});
    }
    Store(s + j, p);
    Store(dp + j, ds);
  };
  const int64_t first = begin / kWidth * kWidth, last = RoundUp(end, kWidth);
  int64_t j = first;
  if (j < begin) {
    step(j, true);
    j += kWidth;
  }
  for (; j + kWidth <= end; j += kWidth) step(j, false);
  if (j < last) step(j, true);
}

// P in place of S and dS in place of dP, which are computed here, for a tile with packed operands.
// Written on all columns up to a multiple of kRowAlignment, for all queries; 0 where hidden.
template <Form kForm>
void ScoreGradients(const Head& head, const TilePlan& plan, const RowStatistics* statistics,
                    const TileScratch& t) {
  using Product = typename ProductOf<kForm>::Type;
  const Problem& p = *head.problem;
  const Tile& tile = *t.tile;
  const Band band = {tile.key_begin, tile.key_end};
  const int64_t columns = RoundUp(tile.num_keys, kWidth);
  Multiply<Product, false, Banded::kColumns>(t.s, plan.tile_row, {t.query, plan.row_width, 1},
                                             t.key, plan.tile_row, tile.num_queries, columns,
                                             p.head_dim, band);
  Multiply<Product, false, Banded::kColumns>(t.dp, plan.tile_row, {t.dout, plan.value_row_width, 1},
                                             t.value, plan.tile_row, tile.num_queries, columns,
                                             p.value_head_dim, band);
  const int64_t end = RoundUp(tile.num_keys, kRowAlignment);
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    float* s = t.s + i * plan.tile_row;
    float* dp = t.dp + i * plan.tile_row;
    int64_t first = tile.key_begin[i] / kWidth * kWidth;
    int64_t last = RoundUp(tile.key_end[i], kWidth);
    if (tile.key_begin[i] >= tile.key_end[i]) {
      first = last = 0;
    } else if (tile.has_elements || statistics[i].factor != 1.0f || IsCoarse(head, statistics[i])) {
      GradientRow(head, tile, i, statistics[i], s, dp, first, last);
    } else {
      PlainGradientRow(head.score_scale, statistics[i], tile.key_begin[i], tile.key_end[i], s, dp);
    }
    for (int64_t j = 0; j < first; j += kWidth) {
      Store(s + j, V{});
      Store(dp + j, V{});
    }
    for (int64_t j = last; j < end; j += kWidth) {
      Store(s + j, V{});
      Store(dp + j, V{});
    }
  }
}

// ---- statistics of rows

struct StatisticsCall {
  const Problem* problem;
  TilePlan plan;
  char* scratch;
  size_t scratch_bytes;       // per worker
  RowStatistics* statistics;  // [num_batches, num_heads, q_len]
};

// exp(sink - logsumexp); the latter in score units.
JFM_CPU_INLINE float SinkWeight(const Head& head, float sink, float logsumexp) {
  return ExpOf(head, ToScoreUnits(head, sink) - logsumexp);
}

// Σ dout ∘ out of a row; NaN if dout holds a NaN or inf, also beside an out of 0.
template <class T>
JFM_CPU_INLINE float RowDot(const T* dout, const T* out, int64_t width) {
  V sum = {};
  I is_finite = BroadcastInt(-1);
  for (int64_t j = 0; j < width; j += kWidth) {
    const V g = LoadPart(dout, j, width);
    is_finite &= IsFinite(g);
    sum = Fma(g, LoadPart(out, j, width), sum);
  }
  return ReduceSum(Select(is_finite, sum, Broadcast(__builtin_nanf(""))));
}

// New statistics of rows with a coarse logsumexp, those of a block of queries whose factor is 0:
// the maximum of their scores in its place, which is one of them and thus exact (a logsumexp has
// been to natural units and back), and as factor 1 / Σ exp(x - maximum).
template <class T, Form kForm>
void FindFactors(const StatisticsCall& call, int64_t batch, int64_t head_index, int64_t first_query,
                 int64_t num_queries, TileScratch& t, RowStatistics* statistics) {
  using Product = typename ProductOf<kForm>::Type;
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  Head head = MakeHead(p, batch, head_index);
  head.has_dropout = false;  // the sum is of what is not dropped
  Seen seen;
  float maxima[kMaxQueries];
  for (float& max : maxima) max = kMostNegative;
  PackRows<kForm>(SourceOf<T>(p, p.query, batch, head_index, first_query, num_queries, p.head_dim),
                  p.scale < 0, t.query, seen);
  float sums[kMaxQueries] = {};
  for (int64_t first_key = 0; first_key < p.kv_len; first_key += plan.block_keys) {
    const int64_t num_keys = AtMost(plan.block_keys, p.kv_len - first_key);
    if (!PrepareTile(head, first_query, num_queries, first_key, num_keys, true, t.memory->At(0),
                     *t.tile)) {
      continue;
    }
    for (int64_t i = 0; i < num_queries; ++i) {
      if (statistics[i].factor != 0.0f) t.tile->key_begin[i] = t.tile->key_end[i] = 0;
    }
    PackTransposed<kForm>(
        SourceOf<T>(p, p.key, batch, head_index / p.num_groups, first_key, num_keys, p.head_dim),
        t.key, plan.tile_row, seen);
    Multiply<Product, false, Banded::kColumns>(
        t.s, plan.tile_row, {t.query, plan.row_width, 1}, t.key, plan.tile_row, num_queries,
        RoundUp(num_keys, kWidth), p.head_dim, {t.tile->key_begin, t.tile->key_end});
    for (int64_t i = 0; i < num_queries; ++i) {
      if (t.tile->key_begin[i] >= t.tile->key_end[i]) continue;
      const int64_t begin = t.tile->key_begin[i] / kWidth * kWidth;
      const int64_t end = RoundUp(t.tile->key_end[i], kWidth);
      float* x = t.s + i * plan.tile_row;
      const float block_max = ReduceMax(ScoreRow(head, *t.tile, i, x, begin, end));
      const float max = block_max > maxima[i] ? block_max : maxima[i];
      const V sum = ProbabilityRow(head, *t.tile, i, x, begin, end, max);
      sums[i] = sums[i] * ExpOf(head, maxima[i] - max) + ReduceSum(sum);
      maxima[i] = max;
    }
  }
  for (int64_t i = 0; i < num_queries; ++i) {
    if (statistics[i].factor != 0.0f) continue;
    if (p.sinks.data != nullptr) {
      const float sink =
          reinterpret_cast<const float*>(p.sinks.data)[OffsetOf(p, p.sinks, batch, head_index)];
      const float x = ToScoreUnits(head, sink);
      const float max = x > maxima[i] ? x : maxima[i];
      sums[i] = sums[i] * ExpOf(head, maxima[i] - max) + ExpOf(head, x - max);
      maxima[i] = max;
    }
    statistics[i].logsumexp = maxima[i];
    statistics[i].factor = 1.0f / sums[i];
  }
}

template <class T, Form kForm>
void RunStatisticsUnit(void* context, int64_t index, int worker) {
  const StatisticsCall& call = *static_cast<const StatisticsCall*>(context);
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  const int64_t first_query = index % plan.num_query_blocks * plan.block_queries;
  const int64_t pair = index / plan.num_query_blocks;
  const int64_t batch = pair / p.num_heads, head_index = pair % p.num_heads;
  const int64_t num_queries = AtMost(plan.block_queries, p.q_len - first_query);
  const auto out =
      SourceOf<T>(p, p.out, batch, head_index, first_query, num_queries, p.value_head_dim);
  const auto dout =
      SourceOf<T>(p, p.dout, batch, head_index, first_query, num_queries, p.value_head_dim);
  const auto logsumexp =
      SourceOf<float>(p, p.logsumexp, batch, head_index, first_query, num_queries, 1);
  const auto dlogsumexp =
      SourceOf<float>(p, p.dlogsumexp, batch, head_index, first_query, num_queries, 1);
  const Head head = MakeHead(p, batch, head_index);
  RowStatistics* statistics = call.statistics + pair * p.q_len + first_query;
  bool any_coarse = false;
  for (int64_t i = 0; i < num_queries; ++i) {
    const float lse = *logsumexp.row(i);
    RowStatistics& row = statistics[i];
    row.delta = RowDot(dout.row(i), out.row(i), p.value_head_dim) - *dlogsumexp.row(i);
    row.logsumexp = !IsFinite(row.delta) ? __builtin_nanf("")
                    : lse == -kInfinity  ? kInfinity
                                         : ToScoreUnits(head, lse);
    row.factor = 1.0f;
    if (IsFinite(lse) && IsCoarse(head, row)) {
      row.factor = 0.0f;
      any_coarse = true;
    }
  }
  if (!any_coarse) return;
  Carver carver = {call.scratch + call.scratch_bytes * worker};
  TileScratch t = TileScratch::Carve(carver, plan);
  FindFactors<T, kForm>(call, batch, head_index, first_query, num_queries, t, statistics);
}

JFM_CPU_INLINE int64_t NumStatisticsUnits(const Problem& p, const TilePlan& plan) {
  return p.num_batches * p.num_heads * plan.num_query_blocks;
}

// Fills statistics [num_batches, num_heads, q_len]. `scratch`: for as many workers as there can be,
// with TileScratch first.
template <class T, Form kForm>
void FindStatistics(const Problem& p, const TilePlan& plan, char* scratch, size_t scratch_bytes,
                    RowStatistics* statistics, Workers& workers) {
  StatisticsCall call = {&p, plan, scratch, scratch_bytes, statistics};
  workers.Run(NumStatisticsUnits(p, plan), RunStatisticsUnit<T, kForm>, &call);
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
