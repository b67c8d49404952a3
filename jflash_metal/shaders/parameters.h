// What a kernel needs to know of one call beyond its arrays. jflash_metal/_parameters.py has the same structure for
// Python.
#pragma once

/// Distances between neighbours in [B, L, heads, features], in elements.
struct RowStrides {
  long batch;
  int row;
  int head;
};

/// Distances between neighbours in [#B, #N, #T, #S], in elements; 0 along an axis that the array shares.
struct PairStrides {
  long batch;
  long head;
  long query;
  long key;
};

struct Parameters {
  RowStrides query;
  RowStrides key;
  RowStrides value;
  RowStrides out;
  PairStrides bias;
  PairStrides mask;
  /// B, T, S and N, and how many query heads share a key head.
  int batch;
  int queries;
  int keys;
  int heads;
  int group;
  /// How many batch entries and heads the bias has: 1 where it is shared.
  int bias_batch;
  int bias_heads;
  /// Distances between batch entries, in elements; 0 where the batch shares the array.
  int scale_stride;
  int alibi_slopes_stride;
  int sinks_stride;
  int query_offset_stride;
  int query_lengths_stride;
  int key_lengths_stride;
  int query_segments_stride;
  int key_segments_stride;
  int query_ranges_stride;
  int key_ranges_stride;
  /// What is known when the call is traced, where it is.
  int query_offset;
  int left;
  int right;
  float scale;
  float soft_cap;
};

static_assert(sizeof(Parameters) == PARAMETERS_SIZE, "Parameters differs from its copy in Python");
