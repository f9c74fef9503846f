// Forward attention: out and logsumexp of a block of rows by an online softmax over blocks of keys
// (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691).
//
// A unit of work is some blocks of rows: queries of one head, or, where there are few, those of
// several heads of a group. They share keys and values, which are packed once for all of them.
//   for each block of keys, for each block of rows that sees some of it:
//     S = Q Kᵀ;  x = score(S), -inf where hidden (scores.h)
//     m' = max(m, rowmax x);  P = exp(x - m');  l = l·exp(m - m') + rowsum P
//     O = O·exp(m - m') + dropout(P) V
//   l += exp(sink - m);  out = O / l;  logsumexp = m + log l
// Where there are few units, keys are split too: each part leaves m, l and O, and a second pass
// merges them. How depends on the shape only, and so does every sum's order.
#pragma once

#include "plugin/cpu/kernels.h"
#include "plugin/cpu/scores.h"
#include "plugin/cpu/scratch.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// Start value of a running maximum: finite, so that a row which sees nothing gives
// exp(-inf - kMostNegative) = 0 instead of exp(-inf + inf) = NaN.
constexpr float kMostNegative = -3.402823466e+38f;

// Enough units for a machine's threads. Fewer, and the keys of a unit are split, in parts of at
// least so many.
constexpr int64_t kManyUnits = 32;
constexpr int64_t kMinSplitKeys = 4 * kBlockKeys;
// More, and a unit has several blocks of rows, whose Q and O take at most so many bytes: keys and
// values are read less often. Rows of a head lie far apart in memory where there are several heads,
// and of those few fit a cache.
constexpr int64_t kMaxRowBytes = 400 << 10;

// How a forward pass is cut. Depends on the shape only.
struct ForwardPlan {
  int64_t block_queries;   // of a head, in a block of rows
  int64_t heads_per_unit;  // of a group; several only if there is one block of queries
  int64_t blocks_per_unit;
  int64_t num_query_units, num_head_blocks;  // of a head, and of a group
  int64_t num_splits, keys_per_split;
  int64_t num_units;
  int64_t width, value_width;  // row lengths in memory of packed query and out, elements

  int64_t rows_per_block() const { return block_queries * heads_per_unit; }
  int64_t rows_per_unit() const { return rows_per_block() * blocks_per_unit; }
};

template <Form kForm>
ForwardPlan PlanForward(const Problem& p) {
  ForwardPlan plan;
  plan.block_queries = AtMost(p.q_len, kBlockQueries);
  // Equal blocks, in whole tiles.
  const int64_t num_blocks = CeilDiv(p.q_len, plan.block_queries);
  if (num_blocks > 1) plan.block_queries = RoundUp(CeilDiv(p.q_len, num_blocks), kTileRows);
  plan.heads_per_unit = AtLeast(AtMost(p.num_groups, kBlockQueries / plan.block_queries), 1);
  plan.num_head_blocks = CeilDiv(p.num_groups, plan.heads_per_unit);
  plan.width = RoundUp(NumElements<kForm>(p.head_dim), kWidth);
  plan.value_width = RoundUp(p.value_head_dim, kWidth);
  const int64_t num_heads = p.num_batches * p.num_kv_heads * plan.num_head_blocks;
  const int64_t row_bytes =
      static_cast<int64_t>(sizeof(float)) * plan.rows_per_block() * (plan.width + plan.value_width);
  plan.blocks_per_unit = AtLeast(
      AtMost(AtMost(num_blocks, kMaxRowBytes / row_bytes), num_heads * num_blocks / kManyUnits), 1);
  plan.num_query_units = CeilDiv(num_blocks, plan.blocks_per_unit);
  const int64_t num_row_units = num_heads * plan.num_query_units;
  plan.num_splits = AtLeast(AtMost(kManyUnits / num_row_units, p.kv_len / kMinSplitKeys), 1);
  plan.keys_per_split = RoundUp(CeilDiv(p.kv_len, plan.num_splits), kBlockKeys);
  plan.num_splits = AtLeast(CeilDiv(p.kv_len, AtLeast(plan.keys_per_split, 1)), 1);
  plan.num_units = num_row_units * plan.num_splits;
  return plan;
}

// The memory of a worker.
struct ForwardScratch {
  // Of a unit.
  float* query;  // [rows, width]
  float* out;    // [rows, value_width]
  float* max;    // [rows], in score units
  float* sums;   // [rows, kWidth]
  // Of a block of keys.
  float* key;    // transposed
  float* value;  // stacked
  // Of that and a block of rows.
  float* scores;         // [rows, kBlockKeys]
  int32_t *begin, *end;  // [rows]: the band
  Tile* tiles;           // per head
  TileMemory* memory;

  static ForwardScratch Carve(Carver& carver, const ForwardPlan& plan) {
    const int64_t rows = plan.rows_per_unit();
    ForwardScratch s;
    s.query = carver.Take<float>(rows * plan.width);
    s.scores = carver.Take<float>(plan.rows_per_block() * kBlockKeys);
    s.key = carver.Take<float>(plan.width * kBlockKeys);
    s.value = carver.Take<float>(plan.value_width * kBlockKeys);
    s.out = carver.Take<float>(rows * plan.value_width);
    s.max = carver.Take<float>(rows);
    s.sums = carver.Take<float>(rows * kWidth);
    s.begin = carver.Take<int32_t>(plan.rows_per_block());
    s.end = carver.Take<int32_t>(plan.rows_per_block());
    s.tiles = carver.Take<Tile>(plan.heads_per_unit);
    s.memory = carver.Take<TileMemory>(1);
    return s;
  }
};

// What a part of the keys leaves for the merge.
struct Partials {
  float* out;  // [num_units, rows, value_width]
  float* max;  // [num_units, rows]
  float* sum;
};

struct ForwardCall {
  const Problem* problem;
  ForwardPlan plan;
  char* scratch;
  size_t scratch_bytes;  // per worker
  Partials partials;     // with several splits
};

// Where a unit stands.
struct ForwardUnit {
  int64_t batch, kv_head, first_head, num_heads, first_query, num_queries, split;
};

// A block of the unit's rows: [head, query].
struct RowBlock {
  int64_t first_row;  // in the unit
  int64_t first_query, num_queries, num_rows;
};
inline RowBlock RowBlockOf(const ForwardPlan& plan, const ForwardUnit& unit, int64_t index) {
  RowBlock block;
  block.first_row = index * plan.rows_per_block();
  block.first_query = unit.first_query + index * plan.block_queries;
  block.num_queries =
      AtMost(plan.block_queries, unit.first_query + unit.num_queries - block.first_query);
  block.num_rows = unit.num_heads * block.num_queries;
  return block;
}
inline int64_t NumRowBlocks(const ForwardPlan& plan, const ForwardUnit& unit) {
  return CeilDiv(unit.num_queries, plan.block_queries);
}

inline ForwardUnit UnitOf(const ForwardCall& call, int64_t index) {
  const Problem& p = *call.problem;
  const ForwardPlan& plan = call.plan;
  ForwardUnit unit;
  unit.split = index % plan.num_splits;
  index /= plan.num_splits;
  // Units that share keys are neighbours: those may still be in a cache. The last queries first:
  // with a causal mask they have the most work.
  const int64_t queries = plan.block_queries * plan.blocks_per_unit;
  unit.first_query = (plan.num_query_units - 1 - index % plan.num_query_units) * queries;
  unit.num_queries = AtMost(queries, p.q_len - unit.first_query);
  index /= plan.num_query_units;
  const int64_t head_block = index % plan.num_head_blocks;
  index /= plan.num_head_blocks;
  unit.kv_head = index % p.num_kv_heads;
  unit.batch = index / p.num_kv_heads;
  unit.first_head = unit.kv_head * p.num_groups + head_block * plan.heads_per_unit;
  unit.num_heads = AtMost(plan.heads_per_unit, p.num_groups - head_block * plan.heads_per_unit);
  return unit;
}

// Rows whose scores need nothing but a product and a range. In place, products -> probabilities on
// [begin, end), multiples of kRowAlignment, of which [key_begin, key_end) is seen; kPairs: as
// pairs. Returns the factor of what was accumulated before.
template <Form kForm>
JFM_CPU_INLINE float PlainRow(float* x, int64_t begin, int64_t end, int64_t key_begin,
                              int64_t key_end, float scale, float* row_max, float* row_sum) {
  // What is seen, up to whole vectors; what is not of these becomes -inf.
  int64_t first = key_begin / kRowAlignment * kRowAlignment;
  int64_t last = RoundUp(key_end, kRowAlignment);
  if (key_begin >= key_end) first = last = begin;
  // (Of the last two vectors the second may hold what no product has written.)
  const auto hide = [&](int64_t j) {
    const I column = Lanes() + static_cast<int32_t>(j);
    const I seen =
        (column >= static_cast<int32_t>(key_begin)) & (column < static_cast<int32_t>(key_end));
    Store(x + j, Select(seen, Load(x + j), Broadcast(-kInfinity)));
  };
  if (first < last) {
    if (key_begin > first) {
      hide(first);
      hide(first + kWidth);
    }
    if (key_end < last) {
      hide(last - kWidth);
      hide(last - 2 * kWidth);
    }
  }
  V max0 = Broadcast(-kInfinity), max1 = max0;
  for (int64_t j = first; j < last; j += 2 * kWidth) {
    max0 = Max(Load(x + j), max0);
    max1 = Max(Load(x + j + kWidth), max1);
  }
  const float block_max = ReduceMax(Max(max0, max1)) * scale;
  const float max = block_max > *row_max ? block_max : *row_max;
  const float correction = *row_max - max;
  *row_max = max;
  const V shift = Broadcast(max), factor = Broadcast(scale);
  V sum0 = {}, sum1 = {};
  for (int64_t j = begin; j < first; j += 2 * kWidth) {
    Store(x + (kForm == Form::kPairs ? j / 2 : j), V{});
    if (kForm != Form::kPairs) Store(x + j + kWidth, V{});
  }
  for (int64_t j = first; j < last; j += 2 * kWidth) {
    // Not fused: beyond 2^31 an unrounded product less the rounded maximum is far from 0.
    const V p0 = Exp2(Load(x + j) * factor - shift);
    const V p1 = Exp2(Load(x + j + kWidth) * factor - shift);
    sum0 += p0;
    sum1 += p1;
#if defined(__AVX512BF16__)
    if constexpr (kForm == Form::kPairs) {
      Store(x + j / 2, PairsOf(p0, p1));
      continue;
    }
#endif
    Store(x + j, p0);
    Store(x + j + kWidth, p1);
  }
  for (int64_t j = last; j < end; j += 2 * kWidth) {
    Store(x + (kForm == Form::kPairs ? j / 2 : j), V{});
    if (kForm != Form::kPairs) Store(x + j + kWidth, V{});
  }
  const V factors = Exp2(Broadcast(correction));
  Store(row_sum, Fma(Load(row_sum), factors, sum0 + sum1));
  return factors[0];
}

// PlainRow for any row, by scores.h.
template <Form kForm>
float GeneralRow(const Head& head, const Tile& tile, int64_t row, float* x, int64_t begin,
                 int64_t end, float* row_max, float* row_sum) {
  const float block_max = ReduceMax(ScoreRow(head, tile, row, x, begin, end));
  const float max = block_max > *row_max ? block_max : *row_max;
  const float correction = ExpOf(head, *row_max - max);
  *row_max = max;
  const V sum = ProbabilityRow(head, tile, row, x, begin, end, max);
#if defined(__AVX512BF16__)
  if constexpr (kForm == Form::kPairs) PairColumns(x, begin, end);
#endif
  Store(row_sum, Fma(Load(row_sum), Broadcast(correction), sum));
  return correction;
}

// The tiles of a block of rows and one of keys, and their band. false: nobody sees anyone.
inline bool PrepareTiles(const ForwardUnit& unit, const Head* heads, const RowBlock& block,
                         bool is_careful, int64_t first_key, int64_t num_keys, ForwardScratch& s) {
  bool any = false;
  for (int64_t h = 0; h < unit.num_heads; ++h) {
    Tile& tile = s.tiles[h];
    int32_t* begin = s.begin + h * block.num_queries;
    int32_t* end = s.end + h * block.num_queries;
    const size_t bytes = sizeof(*begin) * static_cast<size_t>(block.num_queries);
    if (PrepareTile(heads[h], block.first_query, block.num_queries, first_key, num_keys, is_careful,
                    s.memory->At(h * block.num_queries), tile)) {
      any = true;
      std::memcpy(begin, tile.key_begin, bytes);
      std::memcpy(end, tile.key_end, bytes);
    } else {
      std::memset(begin, 0, bytes);
      std::memset(end, 0, bytes);
    }
  }
  return any;
}

// S -> P for a block of rows, and O·exp(m - m').
template <Form kForm>
void SoftmaxOfBlock(const ForwardPlan& plan, const Head* heads, const RowBlock& block,
                    bool is_careful, int64_t num_keys, ForwardScratch& s) {
  for (int64_t first = 0; first < block.num_rows; first += kTileRows) {
    const int64_t count = AtMost(block.num_rows - first, kTileRows);
    const Span hull = HullOf({s.begin, s.end}, first, count, num_keys);
    if (hull.begin >= hull.end) continue;
    const int64_t begin = hull.begin / kRowAlignment * kRowAlignment;
    const int64_t end = RoundUp(hull.end, kRowAlignment);
    for (int64_t row = first; row < first + count; ++row) {
      float* x = s.scores + row * kBlockKeys;
      if (s.begin[row] >= s.end[row]) {  // also of a head to which the whole block is hidden
        std::memset(x + (kForm == Form::kPairs ? begin / 2 : begin), 0,
                    sizeof(*x) * static_cast<size_t>(NumElements<kForm>(end - begin)));
        continue;
      }
      const int64_t h = row / block.num_queries;
      float* max = s.max + block.first_row + row;
      float* sum = s.sums + (block.first_row + row) * kWidth;
      const float correction =
          s.tiles[h].has_elements || is_careful
              ? GeneralRow<kForm>(heads[h], s.tiles[h], row - h * block.num_queries, x, begin, end,
                                  max, sum)
              : PlainRow<kForm>(x, begin, end, s.begin[row], s.end[row], heads[h].score_scale, max,
                                sum);
      if (correction == 1.0f) continue;
      float* out = s.out + (block.first_row + row) * plan.value_width;
      for (int64_t j = 0; j < plan.value_width; j += kWidth) {
        Store(out + j, Load(out + j) * Broadcast(correction));
      }
    }
  }
}

// Values that are not finite, of a block of keys that was sanitised: a row that sees one becomes
// NaN.
template <class T>
void MarkRowsThatSee(const Source<T>& value, const Head* heads, const RowBlock& block,
                     ForwardScratch& s) {
  for (int64_t k = 0; k < value.num_rows; ++k) {
    if (RowIsFinite(value, k)) continue;
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const int64_t h = row / block.num_queries;
      if (k < s.begin[row] || k >= s.end[row]) continue;
      if (Sees(heads[h], s.tiles[h], row - h * block.num_queries, k)) {
        s.sums[(block.first_row + row) * kWidth] = __builtin_nanf("");
      }
    }
  }
}

// One block of keys for all rows of a unit. `is_careful`: by query and scale.
template <class T, Form kForm>
void ForwardBlock(const ForwardCall& call, const ForwardUnit& unit, const Head* heads,
                  bool is_careful, int64_t first_key, ForwardScratch& s) {
  using Product = typename ProductOf<kForm>::Type;
  const Problem& p = *call.problem;
  const ForwardPlan& plan = call.plan;
  const int64_t num_keys = AtMost(kBlockKeys, p.kv_len - first_key);
  const Source<T> value =
      SourceOf<T>(p, p.value, unit.batch, unit.kv_head, first_key, num_keys, p.value_head_dim);
  Seen key_seen, value_seen;
  bool is_packed = false;
  for (int64_t index = 0; index < NumRowBlocks(plan, unit); ++index) {
    const RowBlock block = RowBlockOf(plan, unit, index);
    if (!PrepareTiles(unit, heads, block, is_careful, first_key, num_keys, s)) continue;
    if (!is_packed) {
      PackTransposed<kForm>(
          SourceOf<T>(p, p.key, unit.batch, unit.kv_head, first_key, num_keys, p.head_dim), s.key,
          kBlockKeys, key_seen);
      PackStacked<kForm>(value, s.value, value_seen);
      if (value_seen.any_large()) {
        Sanitize<kForm>(s.value, NumElements<kForm>(num_keys) * plan.value_width);
      }
      is_packed = true;
      is_careful |= key_seen.any_large();
    }
    const Band band = {s.begin, s.end};
    Multiply<Product, false, Banded::kColumns>(
        s.scores, kBlockKeys, {s.query + block.first_row * plan.width, plan.width, 1}, s.key,
        kBlockKeys, block.num_rows, RoundUp(num_keys, kRowAlignment), p.head_dim, band);
    SoftmaxOfBlock<kForm>(plan, heads, block, is_careful, num_keys, s);
    if (value_seen.any_large()) MarkRowsThatSee(value, heads, block, s);
    Multiply<Product, true, Banded::kDepth>(
        s.out + block.first_row * plan.value_width, plan.value_width, {s.scores, kBlockKeys, 1},
        s.value, plan.value_width, block.num_rows, plan.value_width, num_keys, band);
  }
}

// The end of a row: out = O·factor.
struct RowResult {
  float factor, logsumexp;
};
inline RowResult FinishRow(const Head& head, const float* sink, float max, float sum) {
  if (sum == 0.0f) return {0.0f, -kInfinity};
  float correction = 1.0f;
  if (sink != nullptr) {  // one more score, which has no value
    const float x = ToScoreUnits(head, *sink);
    const float new_max = x > max ? x : max;
    correction = ExpOf(head, max - new_max);
    sum = sum * correction + ExpOf(head, x - new_max);
    max = new_max;
  }
  const float log = head.is_plain ? __builtin_log2f(sum) : __builtin_logf(sum);
  return {correction / sum, FromScoreUnits(head, max + log)};
}

template <class T>
void WriteRow(const Problem& p, const Head& head, int64_t batch, int64_t head_index, int64_t query,
              float max, float sum, const float* out) {
  const float* sink = nullptr;
  if (p.sinks.data != nullptr) {
    sink = reinterpret_cast<const float*>(p.sinks.data) + OffsetOf(p, p.sinks, batch, head_index);
  }
  const RowResult result = FinishRow(head, sink, max, sum);
  T* to = reinterpret_cast<T*>(p.out.data) + OffsetOf(p, p.out, batch, head_index) +
          query * p.out.row_stride;
  for (int64_t j = 0; j < p.value_head_dim; j += kWidth) {
    StorePart(to, j, p.value_head_dim, Load(out + j) * Broadcast(result.factor));
  }
  float* logsumexp =
      reinterpret_cast<float*>(p.logsumexp.data) + OffsetOf(p, p.logsumexp, batch, head_index);
  logsumexp[query * p.logsumexp.row_stride] = result.logsumexp;
}

template <class T, Form kForm>
void RunForwardUnit(void* context, int64_t index, int worker) {
  const ForwardCall& call = *static_cast<const ForwardCall*>(context);
  const Problem& p = *call.problem;
  const ForwardPlan& plan = call.plan;
  const ForwardUnit unit = UnitOf(call, index);
  Carver carver = {call.scratch + call.scratch_bytes * static_cast<size_t>(worker)};
  Head* heads = carver.Take<Head>(plan.heads_per_unit);
  ForwardScratch s = ForwardScratch::Carve(carver, plan);
  const int64_t rows = plan.rows_per_unit();
  for (int64_t row = 0; row < rows; ++row) s.max[row] = kMostNegative;
  std::memset(s.sums, 0, sizeof(float) * static_cast<size_t>(rows * kWidth));
  std::memset(s.out, 0, sizeof(float) * static_cast<size_t>(rows * plan.value_width));

  Range keys = {p.kv_len, 0};
  bool is_careful = false;
  for (int64_t h = 0; h < unit.num_heads; ++h) {
    heads[h] = MakeHead(p, unit.batch, unit.first_head + h);
    is_careful |= HasLargeScale(heads[h]) || heads[h].score_scale == 0.0f;
    // The ranges' ends grow with the query, up to query_length.
    const int64_t last = AtMost(unit.first_query + unit.num_queries, heads[h].query_length) - 1;
    if (last < unit.first_query) continue;
    keys.begin = AtMost(keys.begin, VisibleKeys(heads[h], unit.first_query).begin);
    keys.end = AtLeast(keys.end, VisibleKeys(heads[h], last).end);
  }
  Seen query_seen;
  for (int64_t i = 0; i < NumRowBlocks(plan, unit); ++i) {
    const RowBlock block = RowBlockOf(plan, unit, i);
    for (int64_t h = 0; h < unit.num_heads; ++h) {
      const Source<T> query = SourceOf<T>(p, p.query, unit.batch, unit.first_head + h,
                                          block.first_query, block.num_queries, p.head_dim);
      float* to = s.query + (block.first_row + h * block.num_queries) * plan.width;
      PackRows<kForm>(query, p.scale < 0, to, query_seen);
    }
  }
  is_careful |= query_seen.any_large();

  keys.begin = AtLeast(keys.begin, unit.split * plan.keys_per_split);
  keys.end = AtMost(keys.end, (unit.split + 1) * plan.keys_per_split);
  for (int64_t first = keys.begin / kBlockKeys * kBlockKeys; first < keys.end;
       first += kBlockKeys) {
    ForwardBlock<T, kForm>(call, unit, heads, is_careful, first, s);
  }

  for (int64_t i = 0; i < NumRowBlocks(plan, unit); ++i) {
    const RowBlock block = RowBlockOf(plan, unit, i);
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const int64_t place = block.first_row + row;
      const float* out = s.out + place * plan.value_width;
      const float sum = ReduceSum(Load(s.sums + place * kWidth));
      if (plan.num_splits == 1) {
        const int64_t h = row / block.num_queries;
        WriteRow<T>(p, heads[h], unit.batch, unit.first_head + h,
                    block.first_query + row - h * block.num_queries, s.max[place], sum, out);
      } else {
        const int64_t to = index * plan.rows_per_unit() + place;
        call.partials.max[to] = s.max[place];
        call.partials.sum[to] = sum;
        std::memcpy(call.partials.out + to * plan.value_width, out,
                    sizeof(float) * static_cast<size_t>(plan.value_width));
      }
    }
  }
}

// Merges the parts of a unit's keys. `index` counts units without splits.
template <class T>
void MergeForwardUnit(void* context, int64_t index, int worker) {
  const ForwardCall& call = *static_cast<const ForwardCall*>(context);
  const Problem& p = *call.problem;
  const ForwardPlan& plan = call.plan;
  const ForwardUnit unit = UnitOf(call, index * plan.num_splits);
  Carver carver = {call.scratch + call.scratch_bytes * worker};
  float* out = carver.Take<float>(plan.value_width);
  for (int64_t block_index = 0; block_index < NumRowBlocks(plan, unit); ++block_index) {
    const RowBlock block = RowBlockOf(plan, unit, block_index);
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const int64_t h = row / block.num_queries;
      const Head head = MakeHead(p, unit.batch, unit.first_head + h);
      const int64_t first = index * plan.num_splits * plan.rows_per_unit() + block.first_row + row;
      float max = kMostNegative, sum = 0;
      for (int64_t k = 0; k < plan.num_splits; ++k) {
        const float other = call.partials.max[first + k * plan.rows_per_unit()];
        if (other > max) max = other;
      }
      std::memset(out, 0, sizeof(float) * static_cast<size_t>(plan.value_width));
      for (int64_t k = 0; k < plan.num_splits; ++k) {
        const int64_t place = first + k * plan.rows_per_unit();
        const float factor = ExpOf(head, call.partials.max[place] - max);
        sum += factor * call.partials.sum[place];
        const float* part = call.partials.out + place * plan.value_width;
        for (int64_t j = 0; j < plan.value_width; j += kWidth) {
          Store(out + j, Fma(Load(part + j), Broadcast(factor), Load(out + j)));
        }
      }
      WriteRow<T>(p, head, unit.batch, unit.first_head + h,
                  block.first_query + row - h * block.num_queries, max, sum, out);
    }
  }
}

template <class T, Form kForm>
Outcome ForwardOf(const Problem& p, Workers& workers) {
  if (p.num_batches == 0 || p.q_len == 0) return Outcome::kOk;
  ForwardCall call;
  call.problem = &p;
  call.plan = PlanForward<kForm>(p);
  const ForwardPlan& plan = call.plan;
  Carver measure = {nullptr};
  measure.Take<Head>(plan.heads_per_unit);
  ForwardScratch::Carve(measure, plan);
  call.scratch_bytes = RoundUpToPages(measure.used);
  const int64_t num_workers = workers.max_workers(plan.num_units);
  Scratch scratch(call.scratch_bytes * num_workers);
  const int64_t rows = plan.num_splits == 1 ? 0 : plan.num_units * plan.rows_per_unit();
  Scratch partials(sizeof(float) * rows * (plan.value_width + 2) + 3 * 64);
  if (scratch.data() == nullptr || partials.data() == nullptr) return Outcome::kOutOfMemory;
  call.scratch = scratch.data();
  Carver carver = {partials.data()};
  call.partials.out = carver.Take<float>(rows * plan.value_width);
  call.partials.max = carver.Take<float>(rows);
  call.partials.sum = carver.Take<float>(rows);
  workers.Run(plan.num_units, RunForwardUnit<T, kForm>, &call);
  if (plan.num_splits > 1) {
    workers.Run(plan.num_units / plan.num_splits, MergeForwardUnit<T>, &call);
  }
  return Outcome::kOk;
}

Outcome Forward(const Problem& p, Workers& workers) {
  return WithLayout(p.dtype, true, [&](auto layout) {
    return ForwardOf<typename decltype(layout)::Type, decltype(layout)::kForm>(p, workers);
  });
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
