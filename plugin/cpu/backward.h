// Backward attention: dquery, dkey and dvalue by five products per tile (FlashAttention-2,
// arXiv:2307.08691).
//
// A unit of work is a block of keys of one key-value head:
//   for each query head of the group, for each block of queries that sees a key:
//     P, dS (score_gradient.h);  dV += Pᵀ dO;  dK += dSᵀ Q;  dQ += dS K
//   dK *= scale
// dK and dV are the unit's own. A block of dQ is summed over units in ascending order of the keys,
// whoever computes them: a ticket says whose turn it is. Units are claimed in ascending order too,
// so that who has the turn is at work. So results do not depend on the number of threads.
#pragma once

#include <sched.h>

#include "plugin/cpu/score_gradient.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// dQ of 16-bit types is summed in float32 memory of its own, of which several key-value heads
// ("pairs" with their batch) take turns; that of float32 in the result itself.
struct BackwardCall {
  const Problem* problem;
  TilePlan plan;
  int64_t num_pairs, pairs_at_once;
  char* scratch;
  size_t scratch_bytes;  // per worker
  RowStatistics* statistics;
  int32_t* tickets;   // [num_batches, num_heads, num_query_blocks]: the next block of keys
  int32_t* finished;  // [num_pairs]: units
  float* sums;        // [pairs_at_once, num_groups, q_len, width]; null: not needed
};

// What a worker needs besides a tile.
struct BackwardScratch {
  TileScratch t;
  float* key;     // stacked
  float* dkey;    // [block_keys, width]
  float* dvalue;  // [block_keys, value_width]
  float* dquery;  // [block_queries, width], of one tile
  float* query;   // stacked
  float* dout;
  int32_t *query_begin, *query_end;  // [block_keys]: the band of the transposed tile

  template <Form kForm>
  static BackwardScratch Carve(Carver& carver, const TilePlan& plan) {
    BackwardScratch s;
    s.t = TileScratch::Carve(carver, plan);
    s.key = carver.Take<float>(NumElements<kForm>(plan.block_keys) * plan.width);
    s.dkey = carver.Take<float>(plan.block_keys * plan.width);
    s.dvalue = carver.Take<float>(plan.block_keys * plan.value_width);
    s.dquery = carver.Take<float>(plan.block_queries * plan.width);
    s.query = s.t.query;
    s.dout = s.t.dout;
    if constexpr (kForm == Form::kPairs) {
      s.query = carver.Take<float>(NumElements<kForm>(plan.block_queries) * plan.width);
      s.dout = carver.Take<float>(NumElements<kForm>(plan.block_queries) * plan.value_width);
    }
    s.query_begin = carver.Take<int32_t>(plan.block_keys);
    s.query_end = carver.Take<int32_t>(plan.block_keys);
    return s;
  }
};

// A block of keys of one key-value head, and where its dQ is summed.
struct BackwardUnit {
  int64_t pair, batch, kv_head, slot;
  int64_t key_block, first_key, num_keys;
};

// Of pairs that are worked on at once, the same block of keys of each one after the other: threads
// seldom meet in one pair.
inline BackwardUnit UnitOf(const BackwardCall& call, int64_t index) {
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  const int64_t num_blocks = AtLeast(plan.num_key_blocks, 1);
  const int64_t first_pair = index / (call.pairs_at_once * num_blocks) * call.pairs_at_once;
  const int64_t count = AtMost(call.pairs_at_once, call.num_pairs - first_pair);
  index -= first_pair * num_blocks;
  BackwardUnit unit;
  unit.slot = index % count;
  unit.pair = first_pair + unit.slot;
  unit.batch = unit.pair / p.num_kv_heads;
  unit.kv_head = unit.pair % p.num_kv_heads;
  unit.key_block = index / count;
  unit.first_key = unit.key_block * plan.block_keys;
  unit.num_keys = AtMost(plan.block_keys, p.kv_len - unit.first_key);
  return unit;
}

// Waits until another thread, which is at work on it, has counted up to `value`.
inline void WaitFor(const int32_t* counter, int32_t value) {
  for (int64_t spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != value; ++spins) {
    if (spins > 256) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// The keys that some of a block of queries see by their ranges.
inline Range KeysOfQueries(const Head& head, int64_t first_query, int64_t num_queries) {
  const int64_t last = AtMost(first_query + num_queries, head.query_length) - 1;
  if (last < first_query) return {0, 0};
  return {VisibleKeys(head, first_query).begin, VisibleKeys(head, last).end};
}

// The queries of a tile that see a key, per key, for rows of the left operand that are keys: the
// same for all keys that a product takes together. Returns an empty band, which means everything,
// if all see all.
inline Band QueriesOfKeys(const Tile& tile, int32_t* begin, int32_t* end) {
  bool is_full = true;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    is_full = is_full && tile.key_begin[i] == 0 && tile.key_end[i] == tile.num_keys;
  }
  if (is_full) return {};
  for (int64_t j = 0; j < tile.num_keys; j += kTileRows) begin[j] = end[j] = 0;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    for (int64_t j = tile.key_begin[i] / kTileRows * kTileRows; j < tile.key_end[i];
         j += kTileRows) {
      if (end[j] == 0) begin[j] = static_cast<int32_t>(i);
      end[j] = static_cast<int32_t>(i + 1);
    }
  }
  for (int64_t j = 0; j < tile.num_keys; ++j) {
    begin[j] = begin[j / kTileRows * kTileRows];
    end[j] = end[j / kTileRows * kTileRows];
  }
  return {begin, end};
}

// P and dS as pairs. Along the queries, in place of S: a row of P's and one of dS's take turns.
// Along the keys, of dS only, in place of itself.
inline void PairTile([[maybe_unused]] const TilePlan& plan, [[maybe_unused]] const TileScratch& t) {
#if defined(__AVX512BF16__)
  const Tile& tile = *t.tile;
  const int64_t end = RoundUp(tile.num_keys, kRowAlignment);
  for (int64_t i = 0; i < tile.num_queries; i += 2) {
    float* even_p = t.s + i * plan.tile_row;
    float* odd_p = even_p + plan.tile_row;
    float* even_ds = t.dp + i * plan.tile_row;
    float* odd_ds = even_ds + plan.tile_row;
    if (i + 1 == tile.num_queries) {
      std::memset(odd_p, 0, sizeof(float) * end);
      std::memset(odd_ds, 0, sizeof(float) * end);
    }
    for (int64_t j = 0; j < end; j += 2 * kWidth) {
      const V p0 = PairRows(Load(even_p + j), Load(odd_p + j));
      const V p1 = PairRows(Load(even_p + j + kWidth), Load(odd_p + j + kWidth));
      const V even0 = Load(even_ds + j), even1 = Load(even_ds + j + kWidth);
      const V odd0 = Load(odd_ds + j), odd1 = Load(odd_ds + j + kWidth);
      Store(even_p + j, p0);
      Store(even_p + j + kWidth, p1);
      Store(odd_p + j, PairRows(even0, odd0));
      Store(odd_p + j + kWidth, PairRows(even1, odd1));
      Store(even_ds + j / 2, PairsOf(even0, even1));
      Store(odd_ds + j / 2, PairsOf(odd0, odd1));
    }
  }
#endif
}

// The products of a tile with P and dS: dV += Pᵀ dO, dK += dSᵀ Q, dQ = dS K.
template <Form kForm>
void MultiplyGradients(const TilePlan& plan, BackwardScratch& s) {
  using Product = typename ProductOf<kForm>::Type;
  constexpr bool kIsPairs = kForm == Form::kPairs;
  const TileScratch& t = s.t;
  const Tile& tile = *t.tile;
  if constexpr (kIsPairs) PairTile(plan, t);
  const Band queries = QueriesOfKeys(tile, s.query_begin, s.query_end);
  const int64_t column = kIsPairs ? 2 * plan.tile_row : plan.tile_row;
  Multiply<Product, true, Banded::kDepth>(s.dvalue, plan.value_width, {t.s, 1, column}, s.dout,
                                          plan.value_width, tile.num_keys, plan.value_width,
                                          tile.num_queries, queries);
  Multiply<Product, true, Banded::kDepth>(
      s.dkey, plan.width, {kIsPairs ? t.s + plan.tile_row : t.dp, 1, column}, s.query, plan.width,
      tile.num_keys, plan.width, tile.num_queries, queries);
  const Band keys = {tile.key_begin, tile.key_end};
  std::memset(s.dquery, 0, sizeof(float) * tile.num_queries * plan.width);
  Multiply<Product, true, Banded::kDepth>(s.dquery, plan.width, {t.dp, plan.tile_row, 1}, s.key,
                                          plan.width, tile.num_queries, plan.width, tile.num_keys,
                                          keys);
}

// Packs a block of queries, and computes everything of its tile with the unit's keys. false: nobody
// sees anybody.
template <class T, Form kForm>
bool ComputeTile(const BackwardCall& call, const BackwardUnit& unit, const Head& head,
                 int64_t head_index, bool has_large_keys, int64_t first_query, int64_t num_queries,
                 BackwardScratch& s) {
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  TileScratch& t = s.t;
  if (!PrepareTile(head, first_query, num_queries, unit.first_key, unit.num_keys,
                   has_large_keys || HasLargeScale(head), t.memory->At(0), *t.tile)) {
    return false;
  }
  const LargeQueries large =
      PackQueries<T, kForm>(p, unit.batch, head_index, first_query, num_queries, t);
  if (large.query) t.tile->has_elements = true;
  ScoreGradients<kForm>(
      head, plan, call.statistics + (unit.batch * p.num_heads + head_index) * p.q_len + first_query,
      t);
  if constexpr (kForm == Form::kPairs) {
    Seen seen;  // nothing new
    PackStacked<kForm>(
        SourceOf<T>(p, p.query, unit.batch, head_index, first_query, num_queries, p.head_dim),
        s.query, seen);
    PackStacked<kForm>(
        SourceOf<T>(p, p.dout, unit.batch, head_index, first_query, num_queries, p.value_head_dim),
        s.dout, seen);
  }
  // Rows that see a NaN or inf have NaN in P or dS; nobody else may meet it, as 0 · NaN.
  if (large.query) {
    Sanitize<kForm>(s.query, NumElements<kForm>(num_queries) * plan.width);
  }
  if (large.dout) {
    Sanitize<kForm>(s.dout, NumElements<kForm>(num_queries) * plan.value_width);
  }
  MultiplyGradients<kForm>(plan, s);
  return true;
}

// Where a block of dQ is summed.
struct Sums {
  float* data;
  int64_t row;
};

// Adds a tile's dQ, null: zeros, to what earlier blocks of keys gave; the last one writes the
// result.
template <class T>
void AddToDquery(const Problem& p, const TilePlan& plan, const float* dquery, Sums sums, T* result,
                 int64_t num_queries, bool is_first, bool is_last) {
  if (dquery == nullptr && !is_first && !is_last) return;
  const V scale = Broadcast(p.scale);
  for (int64_t i = 0; i < num_queries; ++i) {
    Float32* sum = reinterpret_cast<Float32*>(sums.data + i * sums.row);
    T* to = result + i * p.dquery.row_stride;
    for (int64_t j = 0; j < p.head_dim; j += kWidth) {
      V x = dquery == nullptr ? V{} : Load(dquery + i * plan.width + j);
      if (!is_first) x += LoadPart(sum, j, p.head_dim);
      if (is_last) {
        StorePart(to, j, p.head_dim, x * scale);
      } else {
        StorePart(sum, j, p.head_dim, x);
      }
    }
  }
}

// All blocks of queries of one head against the unit's keys.
template <class T, Form kForm>
void BackwardHead(const BackwardCall& call, const BackwardUnit& unit, int64_t head_index,
                  bool has_large_keys, BackwardScratch& s) {
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  const Head head = MakeHead(p, unit.batch, head_index);
  T* dquery = reinterpret_cast<T*>(p.dquery.data) + OffsetOf(p, p.dquery, unit.batch, head_index);
  int32_t* tickets = call.tickets + (unit.batch * p.num_heads + head_index) * plan.num_query_blocks;
  for (int64_t block = 0; block < plan.num_query_blocks; ++block) {
    const int64_t first_query = block * plan.block_queries;
    const int64_t num_queries = AtMost(plan.block_queries, p.q_len - first_query);
    T* result = dquery + first_query * p.dquery.row_stride;
    const Range keys = KeysOfQueries(head, first_query, num_queries);
    int64_t first_block = keys.begin / plan.block_keys;
    int64_t last_block = (keys.end - 1) / plan.block_keys;
    const bool is_empty = keys.begin >= keys.end;
    if (is_empty) first_block = last_block = 0;  // which writes zeros
    if (unit.key_block < first_block || unit.key_block > last_block) continue;
    const bool any =
        !is_empty && ComputeTile<T, kForm>(call, unit, head, head_index, has_large_keys,
                                           first_query, num_queries, s);
    const bool is_first = unit.key_block == first_block;
    const bool is_last = unit.key_block == last_block;
    Sums sums;
    if constexpr (sizeof(T) == sizeof(float)) {
      sums = {reinterpret_cast<float*>(result), p.dquery.row_stride};
    } else {
      const int64_t group = head_index - unit.kv_head * p.num_groups;
      const int64_t row = (unit.slot * p.num_groups + group) * p.q_len + first_query;
      sums = {call.sums == nullptr ? nullptr : call.sums + row * plan.width, plan.width};
    }
    if (!is_first) WaitFor(tickets + block, static_cast<int32_t>(unit.key_block));
    AddToDquery<T>(p, plan, any ? s.dquery : nullptr, sums, result, num_queries, is_first, is_last);
    __atomic_store_n(tickets + block, static_cast<int32_t>(unit.key_block + 1), __ATOMIC_RELEASE);
  }
}

// Writes rows of dK or dV.
template <class T>
void WriteRows(const float* rows, int64_t row, float factor, int64_t num_rows, int64_t width, T* to,
               int64_t to_row) {
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < width; j += kWidth) {
      StorePart(to + i * to_row, j, width, Load(rows + i * row + j) * Broadcast(factor));
    }
  }
}

template <class T, Form kForm>
void RunBackwardUnit(void* context, int64_t index, int worker) {
  const BackwardCall& call = *static_cast<const BackwardCall*>(context);
  const Problem& p = *call.problem;
  const TilePlan& plan = call.plan;
  const BackwardUnit unit = UnitOf(call, index);
  Carver carver = {call.scratch + call.scratch_bytes * worker};
  BackwardScratch s = BackwardScratch::Carve<kForm>(carver, plan);
  bool has_large_keys = false;
  if (unit.num_keys > 0) {
    has_large_keys =
        PackKeys<T, kForm>(p, plan, unit.batch, unit.kv_head, unit.first_key, unit.num_keys, s.t);
    Seen seen;  // nothing new
    PackStacked<kForm>(
        SourceOf<T>(p, p.key, unit.batch, unit.kv_head, unit.first_key, unit.num_keys, p.head_dim),
        s.key, seen);
    if (has_large_keys) {
      Sanitize<kForm>(s.key, NumElements<kForm>(unit.num_keys) * plan.width);
    }
    std::memset(s.dkey, 0, sizeof(float) * unit.num_keys * plan.width);
    std::memset(s.dvalue, 0, sizeof(float) * unit.num_keys * plan.value_width);
  }
  if (call.sums != nullptr && unit.pair >= call.pairs_at_once) {
    // The pair that had this one's memory before.
    WaitFor(call.finished + unit.pair - call.pairs_at_once,
            static_cast<int32_t>(AtLeast(plan.num_key_blocks, 1)));
  }
  for (int64_t g = 0; g < p.num_groups; ++g) {
    BackwardHead<T, kForm>(call, unit, unit.kv_head * p.num_groups + g, has_large_keys, s);
  }
  if (unit.num_keys > 0) {
    T* dkey = reinterpret_cast<T*>(p.dkey.data) + OffsetOf(p, p.dkey, unit.batch, unit.kv_head) +
              unit.first_key * p.dkey.row_stride;
    T* dvalue = reinterpret_cast<T*>(p.dvalue.data) +
                OffsetOf(p, p.dvalue, unit.batch, unit.kv_head) +
                unit.first_key * p.dvalue.row_stride;
    // Blocks that are not stacked of their own have the sign of the scale already.
    const float scale = kForm == Form::kFloat32 && p.scale < 0 ? -p.scale : p.scale;
    WriteRows<T>(s.dkey, plan.width, scale, unit.num_keys, p.head_dim, dkey, p.dkey.row_stride);
    WriteRows<T>(s.dvalue, plan.value_width, 1.0f, unit.num_keys, p.value_head_dim, dvalue,
                 p.dvalue.row_stride);
  }
  __atomic_fetch_add(call.finished + unit.pair, 1, __ATOMIC_RELEASE);
}

// Enough units for a machine's threads.
constexpr int64_t kManyBackwardUnits = 32;

template <class T, Form kForm>
Outcome BackwardOf(const Problem& p, Workers& workers) {
  BackwardCall call = {};
  call.problem = &p;
  call.num_pairs = p.num_batches * p.num_kv_heads;
  if (call.num_pairs == 0) return Outcome::kOk;
  call.plan = PlanTiles<kForm>(p, CeilDiv(kManyBackwardUnits, call.num_pairs));
  const TilePlan& plan = call.plan;
  call.pairs_at_once = AtMost(call.num_pairs, workers.num_threads());
  const int64_t num_units = call.num_pairs * AtLeast(plan.num_key_blocks, 1);
  const int64_t num_tickets = p.num_batches * p.num_heads * plan.num_query_blocks;
  const bool has_sums = sizeof(T) < sizeof(float) && plan.num_key_blocks > 1;

  Carver measure = {nullptr};
  BackwardScratch::Carve<kForm>(measure, plan);
  call.scratch_bytes = RoundUpToPages(measure.used);
  Scratch scratch(call.scratch_bytes *
                  workers.max_workers(AtLeast(num_units, NumStatisticsUnits(p, plan))));
  const auto carve = [&](Carver& carver) {
    call.statistics = carver.Take<RowStatistics>(p.num_batches * p.num_heads * p.q_len);
    call.tickets = carver.Take<int32_t>(num_tickets);
    call.finished = carver.Take<int32_t>(call.num_pairs);
    if (!has_sums) return;
    call.sums = carver.Take<float>(call.pairs_at_once * p.num_groups * p.q_len * plan.width);
  };
  measure = {nullptr};
  carve(measure);
  Scratch shared(measure.used);
  if (scratch.data() == nullptr || shared.data() == nullptr) return Outcome::kOutOfMemory;
  Carver carver = {shared.data()};
  carve(carver);
  call.scratch = scratch.data();
  std::memset(call.tickets, 0, sizeof(int32_t) * num_tickets);
  std::memset(call.finished, 0, sizeof(int32_t) * call.num_pairs);

  FindStatistics<T, kForm>(p, plan, call.scratch, call.scratch_bytes, call.statistics, workers);
  workers.Run(num_units, RunBackwardUnit<T, kForm>, &call);
  return Outcome::kOk;
}

Outcome Backward(const Problem& p, Workers& workers) {
  // An element of dvalue is a sum over the queries, of P of some 1 / kv_len each: for few keys the
  // roundings of P to bfloat16 would add up to more than those of the result.
  const bool may_pair = p.q_len * p.num_groups <= 4 * p.kv_len * p.kv_len;
  return WithLayout(p.dtype, may_pair, [&](auto layout) {
    return BackwardOf<typename decltype(layout)::Type, decltype(layout)::kForm>(p, workers);
  });
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
