// What every attention kernel shares: function constants, operand addresses, 8x8
// fragments, tiles and their products. No kernel here.
#pragma once

#include <metal_stdlib>

#include "attention_params.h"

using namespace metal;

// Register arrays need full unrolling on a GPU; the software device, where they live
// in memory anyway, defines this away to keep its build short.
#ifndef JFM_UNROLL
#define JFM_UNROLL _Pragma("clang loop unroll(full)")
#endif
#define JFM_NO_UNROLL _Pragma("clang loop unroll(disable)")

// What a row of variants.toml instantiates a kernel with. A simdgroup owns a number of rows
// that is a multiple of 8 (8 · ROW_FRAGMENTS), of queries or of keys.
#define JFM_VARIANT_TEMPLATE                                                                    \
  template <typename T, int HEAD_DIM, int BLOCK_Q, int BLOCK_KV, int BLOCK_D, int NUM_SIMDGROUPS, \
            int LOADS, int ROLES>

// Values of LOADS: where products read the rows that a simdgroup does not own. Threadgroup
// memory, to which all threads copied them, or device memory itself, through the cache.
#define JFM_LOADS_THREADGROUP 0
#define JFM_LOADS_DEVICE 1

#define JFM_DECLARE_CONSTANT(type, name, index) constant type name [[function_constant(index)]];
JFM_FUNCTION_CONSTANTS(JFM_DECLARE_CONSTANT)
#undef JFM_DECLARE_CONSTANT

#define JFM_LOG2E 1.44269504088896340736f
#define JFM_LN2 0.693147180559945309417f

// Start value of a running row maximum: finite, so that a row which sees nothing gives
// exp2(-inf - JFM_MOST_NEGATIVE) = 0 instead of exp2(-inf + inf) = NaN.
#define JFM_MOST_NEGATIVE -3.402823466e+38f

// ---------------------------------------------------------------- the grid

// Position in the whole grid, of which this launch may be a part.
METAL_FUNC uint3 whole_grid(constant AttentionParams& params, uint3 position) {
  return uint3(position.x + uint(params.first_group[0]), position.y + uint(params.first_group[1]),
               position.z + uint(params.first_group[2]));
}

// The block of queries of a threadgroup: with causal attention the last ones first, which see
// the most keys, so that the short ones fill the end.
METAL_FUNC int query_block(constant AttentionParams& params, uint x, int block_q) {
  return is_causal ? (params.q_len + block_q - 1) / block_q - 1 - int(x) : int(x);
}

// ---------------------------------------------------------------- operand addresses

// First element of (batch, head). A stride of 0 shares the operand over a dimension.
METAL_FUNC long head_offset(
    constant AttentionParams& params, constant TensorStrides& strides, uint batch, int head) {
  long offset = strides.head * head;
  for (int i = params.num_batch_dims - 1; i >= 0; --i) {
    const uint size = uint(params.batch_sizes[i]);
    offset += strides.batch[i] * long(batch % size);
    batch /= size;
  }
  return offset;
}

// A position among the batch dimensions and the heads.
struct BatchHead {
  uint batch;
  int head;
};

// How many (batch, head) there are along the dimensions that an operand walks (its stride
// is not 0), or along those that it does not.
METAL_FUNC long count_pairs(
    constant AttentionParams& params, constant TensorStrides& strides, bool walked) {
  long count = (strides.head != 0) == walked ? params.num_heads : 1;
  for (int i = 0; i < params.num_batch_dims; ++i) {
    if ((strides.batch[i] != 0) == walked) count *= params.batch_sizes[i];
  }
  return count;
}

// Number `index` of them, the head running fastest; 0 along the other dimensions, so that
// a walked and a not walked one add up to any (batch, head).
METAL_FUNC BatchHead nth_pair(
    constant AttentionParams& params, constant TensorStrides& strides, bool walked, long index) {
  BatchHead pair = {0, 0};
  if ((strides.head != 0) == walked) {
    pair.head = int(index % params.num_heads);
    index /= params.num_heads;
  }
  uint stride = 1;
  for (int i = params.num_batch_dims - 1; i >= 0; --i) {
    const uint size = uint(params.batch_sizes[i]);
    if ((strides.batch[i] != 0) == walked) {
      pair.batch += uint(index % size) * stride;
      index /= size;
    }
    stride *= size;
  }
  return pair;
}

// ---------------------------------------------------------------- non-finite values
// A hidden key must not reach a row through 0 * NaN. Where a block of scores may have hidden
// elements, products therefore take 0 in place of NaN and inf, and a row that does see such a
// value is made NaN through its logsumexp (forward) or delta (backward). Where everybody sees
// everybody, NaN goes its own way. Bit tests, because fast math may drop isfinite().

METAL_FUNC bool is_finite_value(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
METAL_FUNC bool is_minus_infinity(float x) { return as_type<uint>(x) == 0xff800000u; }
METAL_FUNC float finite_or_zero(float x) { return is_finite_value(x) ? x : 0.0f; }
METAL_FUNC float quiet_nan() { return as_type<float>(0x7fc00000u); }

template <typename T>
METAL_FUNC bool row_is_finite(device const T* row, int num_cols) {
  bool finite = true;
  for (int c = 0; c < num_cols; ++c) finite = finite && is_finite_value(float(row[c]));
  return finite;
}

// ---------------------------------------------------------------- fragments
// A lane of a simdgroup holds two neighbouring elements, (row, col) and (row, col + 1),
// of an 8x8 matrix. The lanes of one row differ in bits 0 and 3 of their index.

typedef simdgroup_matrix<float, 8, 8> Fragment;  // of scores and sums

// Of operands, in their own dtype: half the registers, and no conversion before a product.
template <typename T>
using OperandFragment = simdgroup_matrix<T, 8, 8>;

METAL_FUNC int fragment_row(uint lane) { return int(((lane >> 2) & 4) | ((lane >> 1) & 3)); }
METAL_FUNC int fragment_col(uint lane) { return int(((lane >> 1) & 4) | ((lane & 1) << 1)); }

// The columns of two fragments, 16 in all, are dealt out to them in pairs, in turn. Four numbers
// of a row then lie side by side for a lane: one load serves two fragments, and puts both
// numbers of each where a product wants them. Who gets which column is all the same: products sum
// over the columns, or write them back to where they came from. Where the columns do not come in
// 16s, each fragment has 8 neighbours. load_fragments and store_fragments have what dealt_column
// says, for a lane.
#define JFM_DEALT_COLUMNS 16

METAL_FUNC bool deals_columns(int num_cols) { return num_cols % JFM_DEALT_COLUMNS == 0; }

// Which of num_cols columns is number `col` of 8-column fragments, one behind the other.
METAL_FUNC int dealt_column(int col, int num_cols) {
  if (!deals_columns(num_cols)) return col;
  return (col & ~15) + (col & 6) * 2 + (col >> 3 & 1) * 2 + (col & 1);
}

METAL_FUNC Fragment zero_fragment() { return make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }

template <int N>
METAL_FUNC void clear(thread Fragment (&fragments)[N]) {
  JFM_UNROLL for (int i = 0; i < N; ++i) fragments[i] = zero_fragment();
}

METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Replaces NaN and inf by 0; returns whether there was one.
template <typename T>
METAL_FUNC bool sanitize(thread OperandFragment<T>& operand) {
  const float x = float(operand.thread_elements()[0]);
  const float y = float(operand.thread_elements()[1]);
  operand.thread_elements()[0] = T(finite_or_zero(x));
  operand.thread_elements()[1] = T(finite_or_zero(y));
  return !(is_finite_value(x) && is_finite_value(y));
}

// ---------------------------------------------------------------- four numbers at once
// One access each, from any address of an element.

#define JFM_ACCESS_FOUR(T)                                                                      \
  METAL_FUNC vec<T, 4> load_four(device const T* p) { return *(device const packed_##T##4*)p; } \
  METAL_FUNC void store_four(device T* p, vec<T, 4> x) { *(device packed_##T##4*)p = x; }       \
  METAL_FUNC vec<T, 4> load_four(threadgroup const T* p) {                                      \
    return *(threadgroup const packed_##T##4*)p;                                                \
  }                                                                                             \
  METAL_FUNC void store_four(threadgroup T* p, vec<T, 4> x) {                                   \
    *(threadgroup packed_##T##4*)p = x;                                                         \
  }
JFM_ACCESS_FOUR(float)
JFM_ACCESS_FOUR(half)
JFM_ACCESS_FOUR(bfloat)
#undef JFM_ACCESS_FOUR

// ---------------------------------------------------------------- matrices in device memory

// The rows of one (batch, head) of an operand, from some row on.
template <typename T>
struct Matrix {
  device const T* data;
  long row_stride;
  int num_rows;    // left from there; of a matrix that begins past its end not even one
  int num_cols;    // a function constant
  bool has_whole;  // so is this: the rows fill their blocks
};

template <typename T>
METAL_FUNC Matrix<T> make_matrix(
    device const T* data, long row_stride, int num_rows, int num_cols, bool has_whole) {
  Matrix<T> matrix = {data, row_stride, num_rows, num_cols, has_whole};
  return matrix;
}

template <typename T>
METAL_FUNC Matrix<T> rows_from(Matrix<T> matrix, int row) {
  return make_matrix(
      matrix.data + row * matrix.row_stride, matrix.row_stride, matrix.num_rows - row,
      matrix.num_cols, matrix.has_whole);
}

// Of an operand with a row per query, or per key. Its head is one of query's, or of key's.
template <typename T>
METAL_FUNC Matrix<T> query_matrix(
    constant AttentionParams& params, device const T* data, constant TensorStrides& strides,
    uint batch, int head, int num_cols) {
  return make_matrix(
      data + head_offset(params, strides, batch, head), strides.row, params.q_len, num_cols,
      aligned_q);
}

template <typename T>
METAL_FUNC Matrix<T> key_matrix(
    constant AttentionParams& params, device const T* data, constant TensorStrides& strides,
    uint batch, int head, int num_cols) {
  return make_matrix(
      data + head_offset(params, strides, batch, head), strides.row, params.kv_len, num_cols,
      aligned_kv);
}

// One of the first rows of a matrix, as many as a tile has: the offset fits in 32 bits, which a
// load adds by itself. Rows past the end repeat the last one: what they take part in is
// hidden, or not written.
template <typename T>
METAL_FUNC device const T* matrix_row(Matrix<T> matrix, int row) {
  if (!matrix.has_whole) row = min(row, matrix.num_rows - 1);
  if (has_wide_rows) return matrix.data + row * matrix.row_stride;
  return matrix.data + row * int(matrix.row_stride);
}

// An element of a row that is there; 0 beyond the last of num_cols columns (a function constant),
// which is asked only where they do not fill their fragments.
template <typename T, typename Row>
METAL_FUNC T row_element(Row row, int col, int num_cols) {
  return num_cols % 8 == 0 || col < num_cols ? T(row[col]) : T(0.0f);
}

// Four neighbours of them, from a multiple of 4 on.
template <typename T, typename Row>
METAL_FUNC vec<T, 4> row_elements(Row row, int col, int num_cols) {
  if (num_cols % 8 == 0) return load_four(row + col);
  vec<T, 4> x;
  JFM_UNROLL for (int k = 0; k < 4; ++k) x[k] = row_element<T>(row, col + k, num_cols);
  return x;
}

// Two fragments of this lane's row, from the column at `first` on; one, if no more than 8 columns
// are left.
template <typename T, typename Row>
METAL_FUNC void load_fragments(
    thread OperandFragment<T>* fragments, Row first, int num_cols, uint lane) {
  const int col = fragment_col(lane);
  if (deals_columns(num_cols)) {
    const vec<T, 4> x = load_four(first + 2 * col);
    JFM_UNROLL for (int j = 0; j < 2; ++j) {
      fragments[j].thread_elements()[0] = x[2 * j];
      fragments[j].thread_elements()[1] = x[2 * j + 1];
    }
    return;
  }
  JFM_UNROLL for (int j = 0; j < 2; ++j) {
    if (j * 8 < num_cols) {
      fragments[j].thread_elements()[0] = row_element<T>(first, j * 8 + col, num_cols);
      fragments[j].thread_elements()[1] = row_element<T>(first, j * 8 + col + 1, num_cols);
    }
  }
}

// Writes two fragments of this lane's row of a result, times `factor`, in the result's dtype.
template <typename T>
METAL_FUNC void store_fragments(
    thread Fragment* fragments, float factor, device T* first, int num_cols, uint lane) {
  const int col = fragment_col(lane);
  if (deals_columns(num_cols)) {
    vec<T, 4> x;
    JFM_UNROLL for (int j = 0; j < 2; ++j) {
      x[2 * j] = T(fragments[j].thread_elements()[0] * factor);
      x[2 * j + 1] = T(fragments[j].thread_elements()[1] * factor);
    }
    store_four(first + 2 * col, x);
    return;
  }
  JFM_UNROLL for (int j = 0; j < 2; ++j) {
    JFM_UNROLL for (int e = 0; e < 2; ++e) {
      if (j * 8 + col + e < num_cols) {
        first[j * 8 + col + e] = T(fragments[j].thread_elements()[e] * factor);
      }
    }
  }
}

// ---------------------------------------------------------------- own rows

// The rows that a simdgroup owns, as left operand: kept in registers, or read again from
// (cached) memory at every use.
template <typename T, int HEAD_DIM, int ROW_FRAGMENTS, bool KEEP>
struct RowFragments {
  OperandFragment<T> kept[KEEP ? ROW_FRAGMENTS * HEAD_DIM / 8 : 1];
  Matrix<T> matrix;  // from the first of the rows on
};

// Whether the rows of `num_operands` operands should stay in registers beside `others` 32-bit
// registers of sums and scores. 128 are all there are, and some 50 go to positions, addresses
// and what is on its way.
template <typename T, int HEAD_DIM, int ROW_FRAGMENTS>
METAL_FUNC constexpr bool keeps_rows(int num_operands, int others) {
  return num_operands * ROW_FRAGMENTS * HEAD_DIM * int(sizeof(T)) / 16 + others <= 72;
}

// Two fragments of rows 8 r … 8 r + 7, from column first_col on.
template <typename T, int HEAD_DIM, int ROW_FRAGMENTS, bool KEEP>
METAL_FUNC void load_row_fragments(
    thread OperandFragment<T>* fragments,
    thread const RowFragments<T, HEAD_DIM, ROW_FRAGMENTS, KEEP>& rows, int r, int first_col,
    uint lane) {
  load_fragments(
      fragments, matrix_row(rows.matrix, r * 8 + fragment_row(lane)) + first_col,
      rows.matrix.num_cols - first_col, lane);
}

template <typename T, int HEAD_DIM, int ROW_FRAGMENTS, bool KEEP>
METAL_FUNC void load_rows(
    thread RowFragments<T, HEAD_DIM, ROW_FRAGMENTS, KEEP>& rows, Matrix<T> matrix, uint lane) {
  rows.matrix = matrix;
  if (KEEP) {
    JFM_UNROLL for (int r = 0; r < ROW_FRAGMENTS; ++r) {
      JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; d += 2) {
        if (d * 8 < matrix.num_cols) {
          load_row_fragments(
              rows.kept + (KEEP ? r * (HEAD_DIM / 8) + d : 0), rows, r, d * 8, lane);
        }
      }
    }
  }
}

// Writes the rows of a simdgroup, times `factor`.
template <int HEAD_DIM, int ROW_FRAGMENTS, typename T>
METAL_FUNC void store_rows(
    thread Fragment (&rows)[ROW_FRAGMENTS * HEAD_DIM / 8],
    thread const float (&factors)[ROW_FRAGMENTS], device T* destination, long row_stride,
    int first_row, int num_rows, int num_cols, uint lane) {
  JFM_UNROLL for (int r = 0; r < ROW_FRAGMENTS; ++r) {
    const int row = first_row + r * 8 + fragment_row(lane);
    if (row < num_rows) {
      JFM_UNROLL for (int d = 0; d < HEAD_DIM / 8; d += 2) {
        if (d * 8 < num_cols) {
          store_fragments(
              rows + r * (HEAD_DIM / 8) + d, factors[r],
              destination + row * row_stride + d * 8, num_cols - d * 8, lane);
        }
      }
    }
  }
}

// The same with one factor.
template <int HEAD_DIM, int ROW_FRAGMENTS, typename T>
METAL_FUNC void store_all_rows(
    thread Fragment (&rows)[ROW_FRAGMENTS * HEAD_DIM / 8], float factor, device T* destination,
    long row_stride, int first_row, int num_rows, int num_cols, uint lane) {
  float factors[ROW_FRAGMENTS];
  JFM_UNROLL for (int r = 0; r < ROW_FRAGMENTS; ++r) factors[r] = factor;
  store_rows<HEAD_DIM, ROW_FRAGMENTS>(
      rows, factors, destination, row_stride, first_row, num_rows, num_cols, lane);
}

// ---------------------------------------------------------------- tiles

// Elements between two rows of a tile: 16 bytes of padding spread the rows over the banks.
template <typename T, int BLOCK_D>
METAL_FUNC constexpr int tile_row_stride() {
  return BLOCK_D + 16 / int(sizeof(T));
}

// Elements of the threadgroup memory of a tile; where nothing is copied, none is needed.
template <typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC constexpr int tile_size() {
  return LOADS == JFM_LOADS_THREADGROUP ? ROWS * tile_row_stride<T, BLOCK_D>() : 1;
}

// ROWS rows and BLOCK_D columns of a matrix, which the simdgroups of a threadgroup share.
template <typename T, int ROWS, int BLOCK_D, int LOADS>
struct Tile {
  threadgroup T* shared;
  Matrix<T> matrix;  // from the first of the rows on
  int first_col;
};

// All threads of a threadgroup copy the tile. With `sanitizes`, which is the same for all, NaN and
// inf become 0; returns whether this thread met one.
template <int NUM_THREADS, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC bool copy_tile(
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, bool sanitizes, uint thread_index) {
  constexpr int kAtOnce = 16 / int(sizeof(T));
  static_assert(BLOCK_D % JFM_DEALT_COLUMNS == 0, "fragments of a tile come in pairs");
  constexpr int kThreadsPerRow = BLOCK_D / kAtOnce;
  constexpr int kRowsAtOnce = NUM_THREADS / kThreadsPerRow;
  static_assert(NUM_THREADS % kThreadsPerRow == 0, "threads share rows evenly");
  const int col = int(thread_index) % kThreadsPerRow * kAtOnce;
  if (col >= tile.matrix.num_cols - tile.first_col) return false;
  bool found = false;
  // In a loop, of which no compiler knows the end: copies on their way to threadgroup memory would
  // take registers from the sums.
  JFM_NO_UNROLL for (int row = int(thread_index) / kThreadsPerRow; row < ROWS;
                     row += kRowsAtOnce) {
    device const T* source = matrix_row(tile.matrix, row) + tile.first_col;
    threadgroup T* target = tile.shared + row * tile_row_stride<T, BLOCK_D>();
    JFM_UNROLL for (int i = 0; i < kAtOnce; i += 4) {
      vec<T, 4> x = row_elements<T>(source, col + i, tile.matrix.num_cols - tile.first_col);
      if (sanitizes) {
        JFM_UNROLL for (int k = 0; k < 4; ++k) {
          if (!is_finite_value(float(x[k]))) {
            x[k] = T(0.0f);
            found = true;
          }
        }
      }
      store_four(target + col + i, x);
    }
  }
  return found;
}

// Makes columns [first_col, first_col + BLOCK_D) of the first rows of a matrix the tile. All
// threads of a threadgroup call it together; what the tile's memory held is used up. Returns
// what copy_tile does.
template <int NUM_THREADS, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC bool set_tile(
    thread Tile<T, ROWS, BLOCK_D, LOADS>& tile, Matrix<T> matrix, int first_col,
    bool sanitizes, uint thread_index) {
  tile.matrix = matrix;
  tile.first_col = first_col;
  if (LOADS == JFM_LOADS_DEVICE) return false;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool found = copy_tile<NUM_THREADS>(tile, sanitizes, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return found;
}

// Moves two tiles to the columns from first_col on, at once.
template <int NUM_THREADS, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC void set_tiles(
    thread Tile<T, ROWS, BLOCK_D, LOADS>& a, thread Tile<T, ROWS, BLOCK_D, LOADS>& b,
    int first_col, bool sanitizes, uint thread_index) {
  a.first_col = b.first_col = first_col;
  if (LOADS == JFM_LOADS_DEVICE) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  copy_tile<NUM_THREADS>(a, sanitizes, thread_index);
  copy_tile<NUM_THREADS>(b, sanitizes, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Two fragments of rows 8 n … 8 n + 7 of the tile, from its column 8 d on.
template <typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC void load_tile_fragments(
    thread OperandFragment<T>* fragments, thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int n,
    int d, uint lane) {
  const int row = n * 8 + fragment_row(lane);
  const int first_col = tile.first_col + d * 8;
  const int num_cols = tile.matrix.num_cols - first_col;
  if (LOADS == JFM_LOADS_DEVICE) {
    load_fragments(fragments, matrix_row(tile.matrix, row) + first_col, num_cols, lane);
  } else {
    threadgroup const T* p = tile.shared + row * tile_row_stride<T, BLOCK_D>() + d * 8;
    load_fragments(fragments, p, num_cols, lane);
  }
}

// Fragment d of these rows, transposed: its two numbers are of different rows.
template <typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC OperandFragment<T> tile_fragment_transposed(
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int n, int d, uint lane) {
  const int row = n * 8 + fragment_col(lane);
  const int num_cols = tile.matrix.num_cols;
  const int col = dealt_column(d * 8 + fragment_row(lane), num_cols);
  OperandFragment<T> operand;
  JFM_UNROLL for (int e = 0; e < 2; ++e) {
    if (LOADS == JFM_LOADS_DEVICE) {
      operand.thread_elements()[e] = row_element<T>(
          matrix_row(tile.matrix, row + e), tile.first_col + col, num_cols);
    } else {
      threadgroup const T* p = tile.shared + (row + e) * tile_row_stride<T, BLOCK_D>();
      operand.thread_elements()[e] = row_element<T>(p, col, num_cols - tile.first_col);
    }
  }
  return operand;
}

// ---------------------------------------------------------------- products
// Of the R · 8 rows of a simdgroup; N · 8 rows are in the tile. Sums of one loop do not depend
// on each other: a product takes as long as two are issued apart, so four in flight are enough.

// The columns of two fragments, from the tile's column 8 d on.
template <typename T, int HEAD_DIM, int R, bool KEEP, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC void multiply_transposed_columns(
    thread Fragment (&products)[R * ROWS / 8],
    thread const RowFragments<T, HEAD_DIM, R, KEEP>& rows,
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int d, uint lane) {
  const int first_col = tile.first_col + d * 8;
  const int num_cols = rows.matrix.num_cols - first_col;
  if (num_cols <= 0) return;
  OperandFragment<T> a[R * 2];
  JFM_UNROLL for (int r = 0; r < R; ++r) {
    if (KEEP) {
      JFM_UNROLL for (int j = 0; j < 2; ++j) {
        a[r * 2 + j] = rows.kept[KEEP ? r * (HEAD_DIM / 8) + first_col / 8 + j : 0];
      }
    } else {
      load_row_fragments(a + r * 2, rows, r, first_col, lane);
    }
  }
  JFM_UNROLL for (int j = 0; j < 2; ++j) {
    if (j * 8 < num_cols) {
      JFM_UNROLL for (int n = 0; n < ROWS / 8; ++n) {
        OperandFragment<T> b = tile_fragment_transposed(tile, n, d + j, lane);
        JFM_UNROLL for (int r = 0; r < R; ++r) {
          thread Fragment& sum = products[r * (ROWS / 8) + n];
          simdgroup_multiply_accumulate(sum, a[r * 2 + j], b, sum);
        }
      }
    }
  }
}

// products[r][n] += rows r · (8 rows of the tile from 8 n)ᵀ, over the columns of the tile. Rows
// in registers need the loop unrolled; else it is short code that counts: 12 KB are cached.
template <typename T, int HEAD_DIM, int R, bool KEEP, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC void multiply_transposed(
    thread Fragment (&products)[R * ROWS / 8],
    thread const RowFragments<T, HEAD_DIM, R, KEEP>& rows,
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, uint lane) {
  if (KEEP) {
    JFM_UNROLL for (int d = 0; d < BLOCK_D / 8; d += 2) {
      multiply_transposed_columns(products, rows, tile, d, lane);
    }
  } else {
    JFM_NO_UNROLL for (int d = 0; d < BLOCK_D / 8; d += 2) {
      multiply_transposed_columns(products, rows, tile, d, lane);
    }
  }
}

// sums[r][d] += factor[r] · (8 rows of the tile from 8 n, 8 columns from 8 d), over the columns
// of the tile. With `sanitizes`, 0 for NaN and inf; returns whether this lane met one.
template <int HEAD_DIM, int R, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC bool multiply_accumulate_row(
    thread Fragment (&sums)[R * HEAD_DIM / 8], thread Fragment (&factor)[R],
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int n, int first_col, bool sanitizes,
    uint lane) {
  bool found = false;
  JFM_UNROLL for (int d = 0; d < BLOCK_D / 8; d += 2) {
    const int num_cols = tile.matrix.num_cols - first_col - d * 8;
    if (num_cols > 0) {
      OperandFragment<T> b[2];
      load_tile_fragments(b, tile, n, d, lane);
      JFM_UNROLL for (int j = 0; j < 2; ++j) {
        if (j * 8 < num_cols) {
          if (sanitizes) found = sanitize(b[j]) || found;
          JFM_UNROLL for (int r = 0; r < R; ++r) {
            thread Fragment& sum = sums[r * (HEAD_DIM / 8) + first_col / 8 + d + j];
            simdgroup_multiply_accumulate(sum, factor[r], b[j], sum);
          }
        }
      }
    }
  }
  return found;
}

// sums[r][d] += Σ_n factors[r][n] · (8 rows of the tile from 8 n, 8 columns from 8 d), over the
// columns of the tile
template <int HEAD_DIM, int R, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC void multiply_accumulate(
    thread Fragment (&sums)[R * HEAD_DIM / 8], thread Fragment (&factors)[R * ROWS / 8],
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int first_col, uint lane) {
  JFM_UNROLL for (int n = 0; n < ROWS / 8; ++n) {
    Fragment factor[R];
    JFM_UNROLL for (int r = 0; r < R; ++r) factor[r] = factors[r * (ROWS / 8) + n];
    multiply_accumulate_row<HEAD_DIM, R>(sums, factor, tile, n, first_col, false, lane);
  }
}

// The same with 0 for NaN and inf, where a tile in device memory may hold some that not
// everybody sees; returns whether this lane met one. Blocks with hidden elements are few, so
// this is short.
template <int HEAD_DIM, int R, typename T, int ROWS, int BLOCK_D, int LOADS>
METAL_FUNC bool multiply_accumulate_finite(
    thread Fragment (&sums)[R * HEAD_DIM / 8], thread Fragment (&factors)[R * ROWS / 8],
    thread const Tile<T, ROWS, BLOCK_D, LOADS>& tile, int first_col, uint lane) {
  bool found = false;
  JFM_NO_UNROLL for (int n = 0; n < ROWS / 8; ++n) {
    Fragment factor[R];
    JFM_UNROLL for (int r = 0; r < R; ++r) {
      JFM_UNROLL for (int i = 0; i < ROWS / 8; ++i) {  // registers have no index
        if (i == n) factor[r] = factors[r * (ROWS / 8) + i];
      }
    }
    found = multiply_accumulate_row<HEAD_DIM, R>(sums, factor, tile, n, first_col, true, lane) ||
            found;
  }
  return found;
}
