// Who sees whom: causality, window and lengths (a range of keys per query, and of queries per
// key), segment ids, the mask; and who is dropped. One meaning for forward and backward; that of
// metal_kernels/attention_scores.h.
#pragma once

#include "plugin/cpu/dropout.h"
#include "plugin/cpu/pack.h"
#include "plugin/cpu/problem.h"

namespace jfm::cpu::JFM_ISA {
namespace {

// Queries and keys of a block at most. Multiples of kTileRows and of kTileCols.
constexpr int kBlockQueries = 192;
constexpr int kBlockKeys = 256;

struct Range {
  int64_t begin, end;  // empty if end <= begin
};

// First element of (batch, head). `batch` counts over all batch dimensions, the last fastest.
int64_t OffsetOf(const Problem& problem, const Tensor& tensor, int64_t batch, int64_t head) {
  int64_t offset = tensor.head_stride * head;
  for (int i = problem.num_batch_dims - 1; i >= 0; --i) {
    offset += tensor.batch_strides[i] * (batch % problem.batch_sizes[i]);
    batch /= problem.batch_sizes[i];
  }
  return offset;
}

template <class T>
JFM_CPU_INLINE Source<T> SourceOf(const Problem& p, const Tensor& tensor, int64_t batch,
                                  int64_t head, int64_t first_row, int64_t num_rows,
                                  int64_t width) {
  const T* data = reinterpret_cast<const T*>(tensor.data) + OffsetOf(p, tensor, batch, head);
  return {data + first_row * tensor.row_stride, tensor.row_stride, num_rows, width};
}

// ---- operands of one (batch, head)

// What the scores of one (batch, head) depend on besides query and key.
struct Head {
  const Problem* problem;
  float scale;        // |scale|: query is packed with its sign
  float score_scale;  // of q·k to a score in score units
  bool is_plain;      // neither bias nor slopes nor softcap
  const char* bias;   // of this head; null: none
  const uint8_t* mask;
  const int32_t* q_segment_ids;
  const int32_t* kv_segment_ids;
  int64_t query_length, kv_length;  // at most q_len, kv_len
  int64_t q_offset;
  float slope;
  bool has_dropout;
  uint32_t dropout_key[2];  // of this batch and head
};

JFM_CPU_INLINE int64_t Clamp(int64_t x, int64_t low, int64_t high) {
  return AtMost(AtLeast(x, low), high);
}

Head MakeHead(const Problem& problem, int64_t batch, int64_t head) {
  // The operand's elements of this batch and head; null: not given.
  const auto find = [&](const Tensor& tensor, int64_t size) -> const char* {
    if (tensor.data == nullptr) return nullptr;
    return tensor.data + size * OffsetOf(problem, tensor, batch, head);
  };
  const auto find_int = [&](const Tensor& tensor) {
    return reinterpret_cast<const int32_t*>(find(tensor, sizeof(int32_t)));
  };
  Head h = {};
  h.problem = &problem;
  h.is_plain =
      problem.bias.data == nullptr && problem.slopes.data == nullptr && problem.soft_cap == 0.0f;
  h.scale = problem.scale < 0 ? -problem.scale : problem.scale;
  h.score_scale = h.is_plain ? static_cast<float>(h.scale * 1.4426950408889634) : h.scale;
  h.bias = find(problem.bias, problem.bias_dtype == Dtype::kFloat32 ? 4 : 2);
  h.mask = reinterpret_cast<const uint8_t*>(find(problem.mask, 1));
  h.q_segment_ids = find_int(problem.q_segment_ids);
  h.kv_segment_ids = find_int(problem.kv_segment_ids);
  const int32_t* query_length = find_int(problem.query_lengths);
  const int32_t* kv_length = find_int(problem.kv_lengths);
  h.query_length = query_length == nullptr ? problem.q_len : Clamp(*query_length, 0, problem.q_len);
  h.kv_length = kv_length == nullptr ? problem.kv_len : Clamp(*kv_length, 0, problem.kv_len);
  const int32_t* q_offset = find_int(problem.q_offsets);
  h.q_offset = q_offset == nullptr ? problem.q_offset : *q_offset;
  const char* slope = find(problem.slopes, sizeof(float));
  if (slope != nullptr) std::memcpy(&h.slope, slope, sizeof(h.slope));
  const char* key = find(problem.dropout_key, sizeof(uint32_t));
  h.has_dropout = key != nullptr;
  if (h.has_dropout) {
    std::memcpy(h.dropout_key, key, sizeof(h.dropout_key));
    uint32_t words[2] = {static_cast<uint32_t>(*find_int(problem.dropout_batch)),
                         static_cast<uint32_t>(*find_int(problem.dropout_head))};
    Threefry2x32(h.dropout_key[0], h.dropout_key[1], words[0], words[1]);
    std::memcpy(h.dropout_key, words, sizeof(words));
  }
  return h;
}

// ---- ranges

// By causality, window and lengths. Both ends grow with the query; nothing beyond lengths.
// Positions are 64-bit: offsets and windows may be as large as 32 bits allow.
Range VisibleKeys(const Head& head, int64_t query) {
  const Problem& p = *head.problem;
  Range keys = {0, query < head.query_length ? head.kv_length : 0};
  const int64_t position = query + head.q_offset;
  if (p.is_causal) keys.end = AtMost(keys.end, Clamp(position + 1, 0, p.kv_len));
  if (p.window_left >= 0) keys.begin = Clamp(position - p.window_left, 0, p.kv_len);
  if (p.window_right >= 0) {
    keys.end = AtMost(keys.end, Clamp(position + p.window_right + 1, 0, p.kv_len));
  }
  return keys;
}

// ---- tiles

// A block of queries against a block of keys.
struct Tile {
  int64_t first_query, num_queries, first_key, num_keys;
  // The first key that a query sees (but for a bias of -inf) and the one after the last, relative
  // to first_key; 0, 0: none.
  int32_t key_begin[kBlockQueries], key_end[kBlockQueries];
  bool has_elements;  // careful, or more than these ranges decides: the functions of scores.h are
                      // needed
  // [num_queries, kBlockKeys] bytes, 1 or 0, written for the range only; null: all 1.
  const uint8_t* visible;  // mask and segments; not the bias
  const uint8_t* kept;     // dropout
};

// Memory that PrepareTile fills: rows of kBlockKeys bytes.
struct TileBytes {
  uint8_t *visible, *kept;
};
struct TileMemory {
  uint8_t visible[kBlockQueries * kBlockKeys];
  uint8_t kept[kBlockQueries * kBlockKeys];

  // From a row on: several tiles may share the memory.
  TileBytes At(int64_t row) { return {visible + row * kBlockKeys, kept + row * kBlockKeys}; }
};

// Bytes that are looked at together, and ids of as many keys.
constexpr int kMaskWidth = 16;
typedef uint8_t MaskBytes __attribute__((vector_size(kMaskWidth)));
typedef int8_t SignedMaskBytes __attribute__((vector_size(kMaskWidth)));
typedef int32_t MaskIds __attribute__((vector_size(4 * kMaskWidth)));

// Segment ids of a tile.
struct TileSegments {
  bool hides_all, hides_none;
  int32_t queries[kBlockQueries], keys[kBlockKeys];  // of the tile
};

inline void LoadSegments(const Head& head, const Tile& tile, TileSegments& segments) {
  const Problem& p = *head.problem;
  int32_t q_min = INT32_MAX, q_max = INT32_MIN, kv_min = INT32_MAX, kv_max = INT32_MIN;
  int64_t begin = tile.num_keys, end = 0;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    if (tile.key_begin[i] >= tile.key_end[i]) continue;
    begin = AtMost(begin, tile.key_begin[i]);
    end = AtLeast(end, tile.key_end[i]);
    const int32_t id = head.q_segment_ids[(tile.first_query + i) * p.q_segment_ids.row_stride];
    segments.queries[i] = id;
    q_min = id < q_min ? id : q_min;
    q_max = id > q_max ? id : q_max;
  }
  std::memset(segments.keys, 0, sizeof(segments.keys));
  for (int64_t j = begin; j < end; ++j) {
    const int32_t id = head.kv_segment_ids[(tile.first_key + j) * p.kv_segment_ids.row_stride];
    segments.keys[j] = id;
    kv_min = id < kv_min ? id : kv_min;
    kv_max = id > kv_max ? id : kv_max;
  }
  // For sequences packed one behind the other, whose ids are in order, this decides most tiles.
  segments.hides_all = q_max < kv_min || kv_max < q_min;
  segments.hides_none = q_min == kv_max && q_max == kv_min;
}

// A row's visible elements by mask and segments. Narrows the row's range to them and writes their
// bytes. Returns whether the range says it all.
template <bool kHasMask, bool kHasSegments>
bool FindVisible(const uint8_t* mask, int32_t query_id, const int32_t* key_ids, int64_t num_keys,
                 uint8_t* visible, int32_t& key_begin, int32_t& key_end) {
  MaskBytes lanes;
  JFM_CPU_UNROLL for (int i = 0; i < kMaskWidth; ++i) lanes[i] = static_cast<uint8_t>(i);
  int64_t first = -1, last = 0, count = 0;
  for (int64_t j = key_begin / kMaskWidth * kMaskWidth; j < key_end; j += kMaskWidth) {
    const uint8_t from = static_cast<uint8_t>(Clamp(key_begin - j, 0, kMaskWidth));
    const uint8_t to = static_cast<uint8_t>(Clamp(key_end - j, 0, kMaskWidth));
    MaskBytes bytes = (MaskBytes)(lanes >= from) & (MaskBytes)(lanes < to) & 1;
    if constexpr (kHasMask) {
      MaskBytes part = {};
      if (j + kMaskWidth <= num_keys) {
        part = LoadAs<MaskBytes>(mask + j);
      } else {
        std::memcpy(&part, mask + j, static_cast<size_t>(num_keys - j));
      }
      bytes &= (MaskBytes)(part != 0);
    }
    if constexpr (kHasSegments) {
      MaskIds ids;
      std::memcpy(&ids, key_ids + j, sizeof(ids));
      bytes &= (MaskBytes) __builtin_convertvector(ids == query_id, SignedMaskBytes);
    }
    std::memcpy(visible + j, &bytes, sizeof(bytes));
    // Little-endian halves, whose lowest byte is the first key's.
    const uint64_t low = LoadAs<uint64_t>(visible + j), high = LoadAs<uint64_t>(visible + j + 8);
    if ((low | high) == 0) continue;
    if (first < 0) first = j + (low != 0 ? __builtin_ctzll(low) : 64 + __builtin_ctzll(high)) / 8;
    last = j + (high != 0 ? 127 - __builtin_clzll(high) : 63 - __builtin_clzll(low)) / 8;
    count += static_cast<int64_t>(((low + high) * 0x0101010101010101u) >> 56);
  }
  key_begin = first < 0 ? 0 : static_cast<int32_t>(first);
  key_end = first < 0 ? 0 : static_cast<int32_t>(last + 1);
  return count == key_end - key_begin;
}

// The tile's bytes for mask and segments. false: nobody sees anybody.
inline bool FindVisible(const Head& head, uint8_t* visible, Tile& tile) {
  const Problem& p = *head.problem;
  TileSegments segments;
  bool has_segments = head.q_segment_ids != nullptr;
  if (has_segments) {
    LoadSegments(head, tile, segments);
    if (segments.hides_all) return false;
    has_segments = !segments.hides_none;
  }
  if (head.mask == nullptr && !has_segments) return true;
  bool any = false, is_range = true;
  for (int64_t i = 0; i < tile.num_queries; ++i) {
    int32_t &begin = tile.key_begin[i], &end = tile.key_end[i];
    if (begin >= end) continue;
    const uint8_t* mask = head.mask;
    if (mask != nullptr) {
      mask += (tile.first_query + i) * p.mask.row_stride + tile.first_key * p.mask.col_stride;
      if (p.mask.col_stride == 0) {
        if (*mask == 0) {
          begin = end = 0;
          continue;
        }
        mask = nullptr;
      }
    }
    if (mask != nullptr || has_segments) {
      const auto find = mask == nullptr ? FindVisible<false, true>
                        : has_segments  ? FindVisible<true, true>
                                        : FindVisible<true, false>;
      is_range &= find(mask, has_segments ? segments.queries[i] : 0, segments.keys, tile.num_keys,
                       visible + i * kBlockKeys, begin, end);
    }
    any |= begin < end;
  }
  if (!is_range) tile.visible = visible;
  return any;
}

// Fills the tile. false: nobody of the queries sees one of the keys (but for a bias of -inf).
// is_careful: products may be infinite or NaN. first_key is even.
bool PrepareTile(const Head& head, int64_t first_query, int64_t num_queries, int64_t first_key,
                 int64_t num_keys, bool is_careful, TileBytes memory, Tile& tile) {
  tile.first_query = first_query;
  tile.num_queries = num_queries;
  tile.first_key = first_key;
  tile.num_keys = num_keys;
  tile.visible = tile.kept = nullptr;
  bool any = false;
  for (int64_t i = 0; i < num_queries; ++i) {
    const Range keys = VisibleKeys(head, first_query + i);
    const int64_t begin = Clamp(keys.begin - first_key, 0, num_keys);
    const int64_t end = Clamp(keys.end - first_key, 0, num_keys);
    tile.key_begin[i] = begin < end ? static_cast<int32_t>(begin) : 0;
    tile.key_end[i] = begin < end ? static_cast<int32_t>(end) : 0;
    any |= begin < end;
  }
  if (!any) return false;
  if ((head.mask != nullptr || head.q_segment_ids != nullptr) &&
      !FindVisible(head, memory.visible, tile)) {
    return false;
  }
  tile.has_elements = is_careful || !head.is_plain || head.has_dropout || tile.visible != nullptr;
  if (!head.has_dropout) return true;
  constexpr int64_t kStep = 2 * kWidth;
  tile.kept = memory.kept;
  for (int64_t i = 0; i < num_queries; ++i) {
    for (int64_t j = tile.key_begin[i] / kStep * kStep; j < tile.key_end[i]; j += kStep) {
      KeptBytes(head.dropout_key, head.problem->dropout_threshold, first_query + i, first_key + j,
                memory.kept + i * kBlockKeys + j);
    }
  }
  return true;
}

// The bias at a position. false: -inf.
inline bool BiasShows(const Head& head, int64_t query, int64_t key) {
  if (head.bias == nullptr) return true;
  const Tensor& bias = head.problem->bias;
  const int64_t i = query * bias.row_stride + key * bias.col_stride;
  switch (head.problem->bias_dtype) {
    case Dtype::kFloat32:
      return LoadAs<uint32_t>(head.bias + 4 * i) != 0xff800000u;
    case Dtype::kFloat16:
      return LoadAs<uint16_t>(head.bias + 2 * i) != 0xfc00u;
    case Dtype::kBfloat16:
      return LoadAs<uint16_t>(head.bias + 2 * i) != 0xff80u;
  }
  __builtin_unreachable();
}

// Whether row `row` of the tile sees its key number `column`, with everything.
inline bool Sees(const Head& head, const Tile& tile, int64_t row, int64_t column) {
  return column >= tile.key_begin[row] && column < tile.key_end[row] &&
         (tile.visible == nullptr || tile.visible[row * kBlockKeys + column] != 0) &&
         BiasShows(head, tile.first_query + row, tile.first_key + column);
}

}  // namespace
}  // namespace jfm::cpu::JFM_ISA
