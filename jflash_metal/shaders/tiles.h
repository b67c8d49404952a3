// Tiles in threadgroup memory, and the matrix products of them.
//
// A threadgroup of four SIMD-groups owns ROWS rows, and tiles of COLUMNS rows of the other side stream by. Each
// SIMD-group computes 8 of the owned rows. With fewer than 32 rows, SHARE SIMD-groups have the same 8 rows and take the
// 8-wide pieces of a result in turn. Metal does not say which lane holds which element of an 8x8 matrix, so everything
// that is done element by element goes through threadgroup memory.
#pragma once

#include <metal_stdlib>
using namespace metal;

typedef SCALAR Scalar;
/// The type of the output, and of the gradients of queries, keys and values.
typedef RESULT_SCALAR ResultScalar;
typedef vec<Scalar, 4> Scalar4;

constexpr constant int THREADS = 128;
constexpr constant int SIMDGROUPS = 4;
/// The hardware's exponential has base 2.
constexpr constant float LOG2_E = 1.44269504088896341f;
/// Padding of a tile's rows, so that neighbouring rows start in different banks.
constexpr constant int PAD = 16 / sizeof(Scalar);
constexpr constant int SCORE_PAD = 4;
/// Features in each partial sum of a product. A long sum collects roundings of its own size, and the backward subtracts
/// two such sums that are nearly equal.
constexpr constant int PARTIAL_SUM = 16;

/// A head dimension rounded up to whole 8x8 matrices; zeros fill the rest.
constexpr int whole(int features) { return (features + 7) / 8 * 8; }
constexpr int row_stride(int features) { return whole(features) + PAD; }
constexpr int score_stride(int columns) { return columns + SCORE_PAD; }
/// Scalar4 elements of a tile.
constexpr int tile_size(int rows, int features) { return rows * row_stride(features) / 4; }
/// SIMD-groups that have the same 8 rows.
constexpr int share_of(int rows) { return SIMDGROUPS * 8 / rows; }
/// The most 8-wide pieces of a row that each of them takes.
constexpr int pieces(int width, int share) { return (width / 8 + share - 1) / share; }

/// A thread's part of the work.
struct Worker {
  uint index;
  uint lane;
  /// The first of its SIMD-group's rows, and the SIMD-group's index among those with the same rows.
  uint first_row;
  uint part;
};

template <int ROWS>
Worker worker_at(uint index, uint lane, uint simdgroup) {
  return Worker{index, lane, simdgroup / share_of(ROWS) * 8, simdgroup % share_of(ROWS)};
}

/// Rows of a tile in device memory, `stride` elements apart.
struct Rows {
  typedef Scalar Element;
  device const Scalar* start;
  int stride;

  bool is_kept(int) const { return true; }
  device const Scalar* at(int row) const { return start + long(row) * stride; }
  Scalar4 widened(Scalar4 four, int) const { return four; }
};

/// Copies rows of FEATURES elements to a tile. Rows from `valid` on, and those that the source does not keep, become
/// zeros: they are not looked up, and may hold NaN.
template <int ROWS, int FEATURES, typename Source>
void load_tile(threadgroup Scalar* tile, thread const Source& rows, int valid, uint thread_index) {
  constexpr int WIDTH = whole(FEATURES);
  typedef typename Source::Element Element;
  typedef vec<Element, 4> Element4;
  for (int index = int(thread_index); index < ROWS * WIDTH / 4; index += THREADS) {
    int row = index / (WIDTH / 4), column = index % (WIDTH / 4) * 4;
    Scalar4 four = Scalar4(Scalar(0.0f));
    if (row < valid && rows.is_kept(row)) {
      device const Element* source = rows.at(row) + column;
      Element4 found = Element4(Element(0.0f));
      if (FEATURES % 4 == 0) {
        if (column < FEATURES) {
          found = *(device const Element4*)source;
        }
      } else {
        for (int element = 0; element < 4; ++element) {
          if (column + element < FEATURES) {
            found[element] = source[element];
          }
        }
      }
      four = rows.widened(found, row);
    }
    *(threadgroup Scalar4*)(tile + row * row_stride(FEATURES) + column) = four;
  }
}

/// s = rows columns^T over FEATURES, for this SIMD-group's 8 rows and its share of the columns.
template <int COLUMNS, int FEATURES, int SHARE>
void multiply_transposed(
    threadgroup float* s, threadgroup const Scalar* rows, threadgroup const Scalar* columns, Worker worker) {
  constexpr int STRIDE = row_stride(FEATURES), COUNT = pieces(COLUMNS, SHARE);
  simdgroup_float8x8 sums[COUNT], parts[COUNT];
  for (int piece = 0; piece < COUNT; ++piece) {
    sums[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int first = 0; first < whole(FEATURES); first += PARTIAL_SUM) {
    for (int piece = 0; piece < COUNT; ++piece) {
      parts[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int depth = first; depth < whole(FEATURES) && depth < first + PARTIAL_SUM; depth += 8) {
      simdgroup_matrix<Scalar, 8, 8> left;
      simdgroup_load(left, rows + worker.first_row * STRIDE + depth, STRIDE);
      for (int piece = 0; piece < COUNT; ++piece) {
        int column = 8 * (piece * SHARE + int(worker.part));
        if (column < COLUMNS) {
          simdgroup_matrix<Scalar, 8, 8> right;
          simdgroup_load(right, columns + column * STRIDE + depth, STRIDE, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(parts[piece], left, right, parts[piece]);
        }
      }
    }
    for (int piece = 0; piece < COUNT; ++piece) {
      sums[piece].thread_elements() += parts[piece].thread_elements();
    }
  }
  for (int piece = 0; piece < COUNT; ++piece) {
    int column = 8 * (piece * SHARE + int(worker.part));
    if (column < COLUMNS) {
      simdgroup_store(
          sums[piece], s + worker.first_row * score_stride(COLUMNS) + column, score_stride(COLUMNS));
    }
  }
}

/// A SIMD-group's part of a [ROWS, FEATURES] sum, in registers.
template <int ROWS, int FEATURES>
struct Accumulator {
  static constexpr constant int SHARE = share_of(ROWS);
  static constexpr constant int COUNT = pieces(whole(FEATURES), SHARE);
  simdgroup_float8x8 piece[COUNT];

  void clear() {
    for (int index = 0; index < COUNT; ++index) {
      piece[index] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  /// The first column of a piece; the piece is absent if that lies past the end of the row.
  static int column(int index, Worker worker) { return 8 * (index * SHARE + int(worker.part)); }
};

/// acc += p columns, for this SIMD-group's 8 rows of p, a tile [ROWS, COLUMNS].
template <int COLUMNS, int ROWS, int FEATURES>
void multiply_add(
    thread Accumulator<ROWS, FEATURES>& acc,
    threadgroup const Scalar* p,
    threadgroup const Scalar* columns,
    Worker worker) {
  constexpr int STRIDE = row_stride(FEATURES), P_STRIDE = row_stride(COLUMNS);
  for (int depth = 0; depth < COLUMNS; depth += 8) {
    simdgroup_matrix<Scalar, 8, 8> left;
    simdgroup_load(left, p + worker.first_row * P_STRIDE + depth, P_STRIDE);
    for (int index = 0; index < acc.COUNT; ++index) {
      int column = acc.column(index, worker);
      if (column < whole(FEATURES)) {
        simdgroup_matrix<Scalar, 8, 8> right;
        simdgroup_load(right, columns + depth * STRIDE + column, STRIDE);
        simdgroup_multiply_accumulate(acc.piece[index], left, right, acc.piece[index]);
      }
    }
  }
}

/// Multiplies every row by its factor, by way of this SIMD-group's 64 elements of `scratch`. A factor of 0 gives 0,
/// even for infinity and NaN.
template <int ROWS, int FEATURES>
void rescale_rows(
    thread Accumulator<ROWS, FEATURES>& acc,
    threadgroup const float* rescale,
    threadgroup float* scratch,
    Worker worker) {
  for (int index = 0; index < acc.COUNT; ++index) {
    if (acc.column(index, worker) < whole(FEATURES)) {
      simdgroup_store(acc.piece[index], scratch, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint element = worker.lane; element < 64; element += 32) {
        float factor = rescale[worker.first_row + element / 8];
        scratch[element] = factor == 0.0f ? 0.0f : scratch[element] * factor;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_load(acc.piece[index], scratch, 8);
      // The next piece is stored over this one, which another lane may not have loaded yet.
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

/// Writes those of this SIMD-group's rows that lie before `valid`, in the results' dtype.
template <int ROWS, int FEATURES>
void write_rows(
    device ResultScalar* rows,
    int stride,
    int valid,
    thread Accumulator<ROWS, FEATURES>& acc,
    threadgroup float* scratch,
    Worker worker) {
  for (int index = 0; index < acc.COUNT; ++index) {
    int first = acc.column(index, worker);
    if (first < whole(FEATURES)) {
      simdgroup_store(acc.piece[index], scratch, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint element = worker.lane; element < 64; element += 32) {
        int row = int(worker.first_row + element / 8), column = first + int(element % 8);
        if (row < valid && column < FEATURES) {
          rows[long(row) * stride + column] = ResultScalar(scratch[element]);
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

/// The elements of a [ROWS, COLUMNS] tile that a thread has: PER_ROW neighbouring lanes share a row, and each lane has
/// every PER_ROW-th element of it.
template <int ROWS, int COLUMNS>
struct LaneMap {
  static constexpr constant int PER_ROW = THREADS / ROWS;
  static constexpr constant int ELEMENTS = (COLUMNS + PER_ROW - 1) / PER_ROW;
  int row;
  int first_column;

  LaneMap(uint thread_index) : row(int(thread_index) / PER_ROW), first_column(int(thread_index) % PER_ROW) {}
  int column(int element) const { return first_column + element * PER_ROW; }
};

template <int PER_ROW>
float reduce_sum(float value) {
  for (ushort distance = 1; distance < PER_ROW; distance *= 2) {
    value += simd_shuffle_xor(value, distance);
  }
  return value;
}

template <int PER_ROW>
float reduce_max(float value) {
  for (ushort distance = 1; distance < PER_ROW; distance *= 2) {
    value = fmax(value, simd_shuffle_xor(value, distance));
  }
  return value;
}
