// The numbers of one call that come with its launch. jflash_metal/_parameters.py has the same structure in Python.
#pragma once

/// Strides of [B, L, heads, features], in elements.
struct RowStrides {
  long batch;
  int row;
  int head;
};

/// Strides of [#B, #N, #T, #S], in elements; 0 along an axis that the array shares.
struct PairStrides {
  long batch;
  long head;
  long query;
  long key;
};

/// Strides of [#B, #N, ...], in elements; 0 along an axis that the array shares.
struct PlaneStrides {
  long batch;
  long head;
};

struct Parameters {
  RowStrides query;
  RowStrides key;
  RowStrides value;
  RowStrides out;
  PairStrides bias;
  PairStrides mask;
  PlaneStrides key_tiles;
  PlaneStrides query_tiles;
  PlaneStrides tile_masks;
  /// Strides of [#B, #P, #K]: their rows are the pages of a cache.
  RowStrides k_scale;
  RowStrides v_scale;
  /// B, T, S, N, and the number of query heads that share a key head.
  int batch;
  int queries;
  int keys;
  int heads;
  int group;
  /// Batch entries and heads of the bias: 1 where it is shared.
  int bias_batch;
  int bias_heads;
  /// Strides of the batch axis, in elements; 0 where the batch shares the array.
  int scale_stride;
  int alibi_slopes_stride;
  int sinks_stride;
  int query_offset_stride;
  int query_lengths_stride;
  int key_lengths_stride;
  int query_segments_stride;
  int key_segments_stride;
  int query_segment_ranges_stride;
  int key_segment_ranges_stride;
  int page_table_stride;
  /// The number of pages less one; 0 without pages.
  int last_page;
  /// Values known at trace time; 0 for those that are arrays or absent.
  int query_offset;
  int left;
  int right;
  float scale;
  float soft_cap;
};

static_assert(sizeof(Parameters) == PARAMETERS_SIZE, "Parameters differs from its copy in Python");
