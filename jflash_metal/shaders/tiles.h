// Tiles in threadgroup memory, and the matrix products of them.
//
// A threadgroup of four SIMD-groups owns ROWS rows and lets tiles of COLUMNS rows of the other side stream by. Each
// SIMD-group computes 8 of the rows owned; where there are fewer than four times 8, SHARE SIMD-groups have the same 8 rows
// and take the 8-wide pieces of a result in turn. Which lane holds which element of an 8x8 matrix is Apple's secret, so
// whatever is done element by element goes through threadgroup memory.
#pragma once

#include <metal_stdlib>
using namespace metal;

typedef SCALAR Scalar;
typedef vec<Scalar, 4> Scalar4;

constexpr constant int THREADS = 128;
constexpr constant int SIMDGROUPS = 4;
/// Of logits in base 2, the base of the exponentials that the hardware has.
constexpr constant float LOG2_E = 1.44269504088896341f;
/// Rows of a tile are this much longer, so that rows that follow each other start in different banks.
constexpr constant int PAD = 16 / sizeof(Scalar);
constexpr constant int PRODUCT_PAD = 4;
/// So many features are summed before they join the sum of all: a long sum's roundings are as large as itself, and the
/// backward subtracts two such sums that are nearly equal.
constexpr constant int RUN = 16;

/// A head dimension in whole 8x8 matrices; the rest is filled with zeros.
constexpr int whole(int features) { return (features + 7) / 8 * 8; }
constexpr int row_stride(int features) { return whole(features) + PAD; }
constexpr int product_stride(int columns) { return columns + PRODUCT_PAD; }
/// How many Scalar4 a tile takes.
constexpr int tile_size(int rows, int features) { return rows * row_stride(features) / 4; }
/// How many SIMD-groups have the same 8 rows.
constexpr int share_of(int rows) { return SIMDGROUPS * 8 / rows; }
/// How many 8-wide pieces of a row each of them takes at most.
constexpr int pieces(int width, int share) { return (width / 8 + share - 1) / share; }

/// Which part of the work a thread has.
struct Worker {
  uint index;
  uint lane;
  /// Its SIMD-group's first row among those owned, and which of the SIMD-groups with these rows it is.
  uint first_row;
  uint part;
};

template <int ROWS>
Worker worker_at(uint index, uint lane, uint simdgroup) {
  return Worker{index, lane, simdgroup / share_of(ROWS) * 8, simdgroup % share_of(ROWS)};
}

/// Copies rows of FEATURES elements to a tile; rows from `valid` on become zeros, as what they hold may be NaN.
template <int ROWS, int FEATURES>
void stage(threadgroup Scalar* tile, device const Scalar* rows, int stride, int valid, uint thread_index) {
  constexpr int WIDTH = whole(FEATURES);
  for (int index = int(thread_index); index < ROWS * WIDTH / 4; index += THREADS) {
    int row = index / (WIDTH / 4), column = index % (WIDTH / 4) * 4;
    Scalar4 four = Scalar4(Scalar(0.0f));
    if (row < valid) {
      device const Scalar* source = rows + long(row) * stride + column;
      if (FEATURES % 4 == 0) {
        if (column < FEATURES) {
          four = *(device const Scalar4*)source;
        }
      } else {
        for (int element = 0; element < 4; ++element) {
          if (column + element < FEATURES) {
            four[element] = source[element];
          }
        }
      }
    }
    *(threadgroup Scalar4*)(tile + row * row_stride(FEATURES) + column) = four;
  }
}

/// products = rows columns^T, summed over FEATURES: this SIMD-group's 8 rows and its part of the columns.
template <int COLUMNS, int FEATURES, int SHARE>
void multiply_transposed(
    threadgroup float* products, threadgroup const Scalar* rows, threadgroup const Scalar* columns, Worker worker) {
  constexpr int STRIDE = row_stride(FEATURES), COUNT = pieces(COLUMNS, SHARE);
  simdgroup_float8x8 sums[COUNT], parts[COUNT];
  for (int piece = 0; piece < COUNT; ++piece) {
    sums[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int first = 0; first < whole(FEATURES); first += RUN) {
    for (int piece = 0; piece < COUNT; ++piece) {
      parts[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int depth = first; depth < whole(FEATURES) && depth < first + RUN; depth += 8) {
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
          sums[piece], products + worker.first_row * product_stride(COLUMNS) + column, product_stride(COLUMNS));
    }
  }
}

/// A SIMD-group's part of [ROWS, FEATURES] sums, in registers.
template <int ROWS, int FEATURES>
struct Sums {
  static constexpr constant int SHARE = share_of(ROWS);
  static constexpr constant int COUNT = pieces(whole(FEATURES), SHARE);
  simdgroup_float8x8 piece[COUNT];

  void clear() {
    for (int index = 0; index < COUNT; ++index) {
      piece[index] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  /// Where in a row a piece begins; past the row's end there is none.
  static int column(int index, Worker worker) { return 8 * (index * SHARE + int(worker.part)); }
};

/// sums += weights columns: this SIMD-group's 8 rows of weights, [ROWS, COLUMNS] with rows as long as a tile's.
template <int COLUMNS, int ROWS, int FEATURES>
void multiply_add(
    thread Sums<ROWS, FEATURES>& sums,
    threadgroup const Scalar* weights,
    threadgroup const Scalar* columns,
    Worker worker) {
  constexpr int STRIDE = row_stride(FEATURES), WEIGHTS_STRIDE = row_stride(COLUMNS);
  for (int depth = 0; depth < COLUMNS; depth += 8) {
    simdgroup_matrix<Scalar, 8, 8> left;
    simdgroup_load(left, weights + worker.first_row * WEIGHTS_STRIDE + depth, WEIGHTS_STRIDE);
    for (int index = 0; index < sums.COUNT; ++index) {
      int column = sums.column(index, worker);
      if (column < whole(FEATURES)) {
        simdgroup_matrix<Scalar, 8, 8> right;
        simdgroup_load(right, columns + depth * STRIDE + column, STRIDE);
        simdgroup_multiply_accumulate(sums.piece[index], left, right, sums.piece[index]);
      }
    }
  }
}

/// Multiplies every row by its factor, through this SIMD-group's 64 places of `scratch`. A factor of 0 makes zeros, also
/// of what is not finite.
template <int ROWS, int FEATURES>
void multiply_rows(
    thread Sums<ROWS, FEATURES>& sums, threadgroup const float* factors, threadgroup float* scratch, Worker worker) {
  for (int index = 0; index < sums.COUNT; ++index) {
    if (sums.column(index, worker) < whole(FEATURES)) {
      simdgroup_store(sums.piece[index], scratch, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint element = worker.lane; element < 64; element += 32) {
        float factor = factors[worker.first_row + element / 8];
        scratch[element] = factor == 0.0f ? 0.0f : scratch[element] * factor;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_load(sums.piece[index], scratch, 8);
      // The next piece takes the same place, and its store may touch what another lane has yet to load.
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

/// Writes this SIMD-group's rows, those before `valid`, in the call's dtype.
template <int ROWS, int FEATURES>
void write_rows(
    device Scalar* rows,
    int stride,
    int valid,
    thread Sums<ROWS, FEATURES>& sums,
    threadgroup float* scratch,
    Worker worker) {
  for (int index = 0; index < sums.COUNT; ++index) {
    int first = sums.column(index, worker);
    if (first < whole(FEATURES)) {
      simdgroup_store(sums.piece[index], scratch, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint element = worker.lane; element < 64; element += 32) {
        int row = int(worker.first_row + element / 8), column = first + int(element % 8);
        if (row < valid && column < FEATURES) {
          rows[long(row) * stride + column] = Scalar(scratch[element]);
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

/// How the elements of a [ROWS, COLUMNS] product are dealt to threads: neighbours in a SIMD-group share a row, and each
/// has every LANES-th element of it.
template <int ROWS, int COLUMNS>
struct Deal {
  static constexpr constant int LANES = THREADS / ROWS;
  static constexpr constant int COUNT = (COLUMNS + LANES - 1) / LANES;
  int row;
  int first_column;

  Deal(uint thread_index) : row(int(thread_index) / LANES), first_column(int(thread_index) % LANES) {}
  int column(int element) const { return first_column + element * LANES; }
};

template <int LANES>
float sum_of_row(float value) {
  for (ushort distance = 1; distance < LANES; distance *= 2) {
    value += simd_shuffle_xor(value, distance);
  }
  return value;
}

template <int LANES>
float largest_of_row(float value) {
  for (ushort distance = 1; distance < LANES; distance *= 2) {
    value = fmax(value, simd_shuffle_xor(value, distance));
  }
  return value;
}
