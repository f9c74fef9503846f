// The gradient of a bias, of ALiBi's slopes or of sinks.
//
// Of bias and slopes it is dS summed over all that shares an element. A unit of work is a tile of
// the result, or a part of its sum:
//   for each tile of scores that is summed into it:  dS (score_gradient.h)
//     sum += dS, or -dS ∘ distance for slopes
//   rows and columns of the sum summed, if they share an element
// Nothing of the size of the scores is stored but the gradient itself. The sum is in float32 and
// cut by the shape alone: results do not depend on the number of threads.
#pragma once

#include "plugin/cpu/score_gradient.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// ---- dimensions that the gradient walks (its stride is not 0), and those that are summed

struct BatchHead {
  int64_t batch, head;
};

// How many (batch, head) there are along those that it walks, or along the others.
int64_t CountPairs(const Problem& p, bool walked) {
  int64_t count = (p.gradient.head_stride != 0) == walked ? p.num_heads : 1;
  for (int i = 0; i < p.num_batch_dims; ++i) {
    if ((p.gradient.batch_strides[i] != 0) == walked) count *= p.batch_sizes[i];
  }
  return count;
}

// Number `index` of them, the head running fastest; 0 along the other dimensions, so that a walked
// and a summed one add up to any (batch, head).
BatchHead NthPair(const Problem& p, bool walked, int64_t index) {
  BatchHead pair = {0, 0};
  if ((p.gradient.head_stride != 0) == walked) {
    pair.head = index % p.num_heads;
    index /= p.num_heads;
  }
  int64_t stride = 1;
  for (int i = p.num_batch_dims - 1; i >= 0; --i) {
    const int64_t size = p.batch_sizes[i];
    if ((p.gradient.batch_strides[i] != 0) == walked) {
      pair.batch += index % size * stride;
      index /= size;
    }
    stride *= AtLeast(size, 1);
  }
  return pair;
}

// First element of the result for a pair that it walks. OffsetOf, but a batch dimension that is
// summed may be empty.
int64_t OffsetOfResult(const Problem& p, const BatchHead& pair) {
  int64_t offset = pair.head * p.gradient.head_stride, batch = pair.batch;
  for (int i = p.num_batch_dims - 1; i >= 0; --i) {
    const int64_t size = AtLeast(p.batch_sizes[i], 1);
    offset += p.gradient.batch_strides[i] * (batch % size);
    batch /= size;
  }
  return offset;
}

// ---- bias and slopes

// Units that are enough for a machine's threads; fewer tiles are summed in parts. Parts of a tile
// take memory, those of a row or column of it hardly any.
constexpr int64_t kManyTileParts = 16;
constexpr int64_t kManyRowParts = 64;

struct GradientPlan {
  TilePlan tiles;
  bool sums_rows, sums_cols;
  int64_t num_row_tiles, num_col_tiles, num_tiles;  // of the result; the last one over all pairs
  // Tiles of scores that are summed into one: along rows and columns, and in all.
  int64_t num_rows_summed, num_cols_summed, num_summed;
  int64_t num_parts, summed_per_part;
  int64_t part_rows, part_row;  // of a part of a tile in memory: rows, and elements of one
};

template <Form kForm>
GradientPlan PlanGradient(const Problem& p) {
  GradientPlan plan;
  plan.tiles = PlanTiles<kForm>(p, 1);
  plan.sums_rows = p.gradient.row_stride == 0;
  plan.sums_cols = p.gradient.col_stride == 0;
  plan.num_row_tiles = plan.sums_rows ? 1 : plan.tiles.num_query_blocks;
  plan.num_col_tiles = plan.sums_cols ? 1 : plan.tiles.num_key_blocks;
  plan.num_tiles = CountPairs(p, true) * plan.num_row_tiles * plan.num_col_tiles;
  plan.num_rows_summed = plan.sums_rows ? plan.tiles.num_query_blocks : 1;
  plan.num_cols_summed = plan.sums_cols ? plan.tiles.num_key_blocks : 1;
  plan.num_summed = CountPairs(p, false) * plan.num_rows_summed * plan.num_cols_summed;
  const int64_t wanted = plan.sums_rows || plan.sums_cols ? kManyRowParts : kManyTileParts;
  const int64_t num_tiles = AtLeast(plan.num_tiles, 1);
  plan.num_parts = AtLeast(AtMost(CeilDiv(wanted, num_tiles), plan.num_summed), 1);
  plan.summed_per_part = CeilDiv(plan.num_summed, plan.num_parts);
  if (plan.summed_per_part > 0) {
    plan.num_parts = CeilDiv(plan.num_summed, plan.summed_per_part);
  }
  plan.part_rows = plan.sums_rows ? 1 : plan.tiles.block_queries;
  plan.part_row = plan.sums_cols ? kWidth : plan.tiles.block_keys;
  return plan;
}

struct GradientScratch {
  TileScratch t;
  float* sum;  // [block_queries, block_keys]

  static GradientScratch Carve(Carver& carver, const TilePlan& plan) {
    GradientScratch s;
    s.t = TileScratch::Carve(carver, plan);
    s.sum = carver.Take<float>(plan.block_queries * plan.block_keys);
    return s;
  }
};

struct GradientCall {
  const Problem* problem;
  GradientPlan plan;
  char* scratch;
  size_t scratch_bytes;  // per worker
  RowStatistics* statistics;
  float* parts;  // [num_tiles, num_parts, part_rows, part_row]; null: one part
};

// A tile of the result.
struct ResultTile {
  BatchHead pair;
  int64_t row_tile, col_tile;
};

inline ResultTile ResultTileOf(const GradientCall& call, int64_t index) {
  const GradientPlan& plan = call.plan;
  ResultTile tile;
  tile.col_tile = index % plan.num_col_tiles;
  index /= plan.num_col_tiles;
  tile.row_tile = index % plan.num_row_tiles;
  tile.pair = NthPair(*call.problem, true, index / plan.num_row_tiles);
  return tile;
}

template <class T>
void WriteResultAs(const Problem& p, int64_t first, const float* sum, int64_t sum_row,
                   int64_t num_rows, int64_t num_cols) {
  T* to = reinterpret_cast<T*>(p.gradient.data) + first;
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_cols; j += kWidth) {
      StorePart(to + i * p.gradient.row_stride, j, num_cols, Load(sum + i * sum_row + j));
    }
  }
}

// Writes a tile of the result, whose rows lie `sum_row` apart.
inline void WriteResult(const GradientCall& call, const ResultTile& tile, const float* sum,
                        int64_t sum_row) {
  const Problem& p = *call.problem;
  const GradientPlan& plan = call.plan;
  const int64_t row = tile.row_tile * plan.tiles.block_queries;
  const int64_t col = tile.col_tile * plan.tiles.block_keys;
  const int64_t num_rows = plan.sums_rows ? 1 : AtMost(plan.tiles.block_queries, p.q_len - row);
  const int64_t num_cols = plan.sums_cols ? 1 : AtMost(plan.tiles.block_keys, p.kv_len - col);
  const int64_t first =
      OffsetOfResult(p, tile.pair) + row * p.gradient.row_stride + col * p.gradient.col_stride;
  const Dtype dtype = p.gradient_of == GradientOf::kBias ? p.bias_dtype : Dtype::kFloat32;
  switch (dtype) {
    case Dtype::kFloat32:
      return WriteResultAs<Float32>(p, first, sum, sum_row, num_rows, num_cols);
    case Dtype::kFloat16:
      return WriteResultAs<Float16>(p, first, sum, sum_row, num_rows, num_cols);
    case Dtype::kBfloat16:
      return WriteResultAs<Bfloat16>(p, first, sum, sum_row, num_rows, num_cols);
  }
  __builtin_unreachable();
}

// Adds a tile's dS, or what it says of the slope, to the sum.
inline void AddTile(const Head& head, const GradientPlan& plan, const GradientScratch& s) {
  const Tile& tile = *s.t.tile;
  const bool is_of_slopes = head.problem->gradient_of == GradientOf::kSlopes;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    if (tile.key_begin[i] >= tile.key_end[i]) continue;
    const float* ds = s.t.dp + i * plan.tiles.tile_row;
    float* sum = s.sum + i * plan.tiles.block_keys;
    const int64_t first = tile.key_begin[i] / kWidth * kWidth;
    if (is_of_slopes) {
      const Row row = MakeRow(head, tile, i, 0, plan.tiles.block_keys);
      for (int64_t j = first; j < tile.key_end[i]; j += kWidth) {
        Store(sum + j, Load(sum + j) - Load(ds + j) * Distances(row, j));
      }
    } else {
      for (int64_t j = first; j < tile.key_end[i]; j += kWidth) {
        Store(sum + j, Load(sum + j) + Load(ds + j));
      }
    }
  }
}

// The rows and columns of a sum that share an element, into the first ones; by pairs, which keeps
// the roundings small.
inline void ReduceSums(const GradientPlan& plan, float* sum) {
  const int64_t num_rows = plan.tiles.block_queries, row = plan.tiles.block_keys;
  if (plan.sums_rows) {
    for (int64_t step = 1; step < num_rows; step *= 2) {
      for (int64_t i = 0; i + step < num_rows; i += 2 * step) {
        for (int64_t j = 0; j < row; j += kWidth) {
          Store(sum + i * row + j, Load(sum + i * row + j) + Load(sum + (i + step) * row + j));
        }
      }
    }
  }
  if (plan.sums_cols) {
    for (int64_t i = 0; i < plan.part_rows; ++i) {
      V total = {};
      for (int64_t j = 0; j < row; j += kWidth) total += Load(sum + i * row + j);
      sum[i * row] = ReduceSum(total);
    }
  }
}

template <class T, Form kForm>
void RunGradientUnit(void* context, int64_t index, int worker) {
  const GradientCall& call = *static_cast<const GradientCall*>(context);
  const Problem& p = *call.problem;
  const GradientPlan& plan = call.plan;
  const TilePlan& tiles = plan.tiles;
  const int64_t part = index % plan.num_parts;
  const ResultTile result = ResultTileOf(call, index / plan.num_parts);
  Carver carver = {call.scratch + call.scratch_bytes * worker};
  GradientScratch s = GradientScratch::Carve(carver, tiles);
  std::memset(s.sum, 0, sizeof(float) * tiles.block_queries * tiles.block_keys);

  // Pairs, then columns, then rows, which run fastest: keys stay packed.
  int64_t packed_keys = -1;
  bool has_large_keys = false;
  const int64_t end = AtMost((part + 1) * plan.summed_per_part, plan.num_summed);
  for (int64_t i = part * plan.summed_per_part; i < end; ++i) {
    const int64_t row_block = plan.sums_rows ? i % plan.num_rows_summed : result.row_tile;
    const int64_t col = i / plan.num_rows_summed;
    const int64_t col_block = plan.sums_cols ? col % plan.num_cols_summed : result.col_tile;
    const BatchHead summed = NthPair(p, false, col / plan.num_cols_summed);
    const int64_t batch = result.pair.batch + summed.batch;
    const int64_t head_index = result.pair.head + summed.head;
    const int64_t kv_head = head_index / p.num_groups;
    const int64_t first_query = row_block * tiles.block_queries;
    const int64_t first_key = col_block * tiles.block_keys;
    const int64_t num_queries = AtMost(tiles.block_queries, p.q_len - first_query);
    const int64_t num_keys = AtMost(tiles.block_keys, p.kv_len - first_key);
    const Head head = MakeHead(p, batch, head_index);
    if (!PrepareTile(head, first_query, num_queries, first_key, num_keys, HasLargeScale(head),
                     s.t.memory->At(0), *s.t.tile)) {
      continue;
    }
    const int64_t keys = (batch * p.num_kv_heads + kv_head) * tiles.num_key_blocks + col_block;
    if (keys != packed_keys) {
      packed_keys = keys;
      has_large_keys = PackKeys<T, kForm>(p, tiles, batch, kv_head, first_key, num_keys, s.t);
    }
    const LargeQueries large =
        PackQueries<T, kForm>(p, batch, head_index, first_query, num_queries, s.t);
    if (has_large_keys || large.query) s.t.tile->has_elements = true;
    ScoreGradients<kForm>(
        head, tiles, call.statistics + (batch * p.num_heads + head_index) * p.q_len + first_query,
        s.t);
    AddTile(head, plan, s);
  }
  ReduceSums(plan, s.sum);
  if (call.parts == nullptr) {
    WriteResult(call, result, s.sum, tiles.block_keys);
    return;
  }
  float* to = call.parts + index * plan.part_rows * plan.part_row;
  for (int64_t i = 0; i < plan.part_rows; ++i) {
    std::memcpy(to + i * plan.part_row, s.sum + i * tiles.block_keys,
                sizeof(float) * plan.part_row);
  }
}

// The sum of a tile's parts, in their order.
inline void SumParts(void* context, int64_t index, int) {
  const GradientCall& call = *static_cast<const GradientCall*>(context);
  const GradientPlan& plan = call.plan;
  const int64_t size = plan.part_rows * plan.part_row;
  float* sum = call.parts + index * plan.num_parts * size;
  for (int64_t part = 1; part < plan.num_parts; ++part) {
    const float* other = sum + part * size;
    for (int64_t j = 0; j < size; j += kWidth) Store(sum + j, Load(sum + j) + Load(other + j));
  }
  WriteResult(call, ResultTileOf(call, index), sum, plan.part_row);
}

// ---- sinks

// -Σ exp(sink - logsumexp) · factor · delta over the rows of every (batch, head) that shares a
// sink. A row that sees no key has no use for it.
inline void RunSinksUnit(void* context, int64_t index, int) {
  const GradientCall& call = *static_cast<const GradientCall*>(context);
  const Problem& p = *call.problem;
  const BatchHead kept = NthPair(p, true, index);
  const int64_t num_summed = CountPairs(p, false);
  double sum = 0;
  for (int64_t i = 0; i < num_summed; ++i) {
    const BatchHead summed = NthPair(p, false, i);
    const int64_t batch = kept.batch + summed.batch, head_index = kept.head + summed.head;
    const Head head = MakeHead(p, batch, head_index);
    const float sink =
        reinterpret_cast<const float*>(p.sinks.data)[OffsetOf(p, p.sinks, batch, head_index)];
    const float* logsumexp = reinterpret_cast<const float*>(p.logsumexp.data) +
                             OffsetOf(p, p.logsumexp, batch, head_index);
    const RowStatistics* statistics =
        call.statistics + (batch * p.num_heads + head_index) * p.q_len;
    for (int64_t row = 0; row < p.q_len; ++row) {
      if (logsumexp[row * p.logsumexp.row_stride] == -kInfinity) continue;
      const float weight = SinkWeight(head, sink, statistics[row].logsumexp);
      sum -= static_cast<double>(weight * statistics[row].factor * statistics[row].delta);
    }
  }
  reinterpret_cast<float*>(p.gradient.data)[OffsetOfResult(p, kept)] = static_cast<float>(sum);
}

template <class T, Form kForm>
Outcome RunGradient(const Problem& p, Workers& workers) {
  GradientCall call = {};
  call.problem = &p;
  call.plan = PlanGradient<kForm>(p);
  const GradientPlan& plan = call.plan;
  const bool is_of_sinks = p.gradient_of == GradientOf::kSinks;
  const int64_t num_units = is_of_sinks ? CountPairs(p, true) : plan.num_tiles * plan.num_parts;
  Carver measure = {nullptr};
  GradientScratch::Carve(measure, plan.tiles);
  call.scratch_bytes = RoundUpToPages(measure.used);
  Scratch scratch(call.scratch_bytes *
                  workers.max_workers(AtLeast(num_units, NumStatisticsUnits(p, plan.tiles))));
  const auto carve = [&](Carver& carver) {
    call.statistics = carver.Take<RowStatistics>(p.num_batches * p.num_heads * p.q_len);
    call.parts = plan.num_parts == 1 || is_of_sinks
                     ? nullptr
                     : carver.Take<float>(num_units * plan.part_rows * plan.part_row);
  };
  measure = {nullptr};
  carve(measure);
  Scratch shared(measure.used);
  if (scratch.data() == nullptr || shared.data() == nullptr) return Outcome::kOutOfMemory;
  Carver carver = {shared.data()};
  carve(carver);
  call.scratch = scratch.data();

  FindStatistics<T, kForm>(p, plan.tiles, call.scratch, call.scratch_bytes, call.statistics,
                           workers);
  if (is_of_sinks) {
    workers.Run(num_units, RunSinksUnit, &call);
    return Outcome::kOk;
  }
  workers.Run(num_units, RunGradientUnit<T, kForm>, &call);
  if (call.parts != nullptr) workers.Run(plan.num_tiles, SumParts, &call);
  return Outcome::kOk;
}

Outcome Gradient(const Problem& p, Workers& workers) {
  return WithLayout(p.dtype, true, [&](auto layout) {
    return RunGradient<typename decltype(layout)::Type, decltype(layout)::kForm>(p, workers);
  });
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
