// Where the rows of keys and values lie: one after the other, or in the pages of a cache.
//
// Key j of a batch entry is row j % PAGE_SIZE of the page that its table has at j / PAGE_SIZE. A cache of 8 bits, or with
// scales, is widened as a tile is loaded: its number times its page's scale, rounded to Scalar.
#pragma once

#include "operands.h"

/// The rows of one key head from `first` on.
template <bool IS_SCALED>
struct CacheRows {
  typedef CacheScalar Element;
  /// The head in the first row of all.
  device const CacheScalar* start;
  int stride;
  int first;
  /// What a call with pages has: its entry's table, the last page, and the scale of each page, `scale_stride` apart.
  device const int* table;
  int last_page;
  device const float* scales;
  int scale_stride;

  bool is_kept(int) const { return true; }

  /// The page of a row. An entry of the table that names no page reads one that is there.
  int page(int row) const { return clamp(table[(first + row) / PAGE_SIZE], 0, last_page); }

  device const CacheScalar* at(int row) const {
    long place = HAS_PAGES ? long(page(row)) * PAGE_SIZE + (first + row) % PAGE_SIZE : long(first + row);
    return start + place * stride;
  }

  Scalar4 widened(vec<CacheScalar, 4> four, int row) const {
    float scale = IS_SCALED ? scales[page(row) * scale_stride] : 1.0f;
    Scalar4 result;
    for (int element = 0; element < 4; ++element) {
      result[element] = IS_SCALED ? Scalar(float(four[element]) * scale) : Scalar(four[element]);
    }
    return result;
  }
};

inline CacheRows<HAS_K_SCALE> key_rows(thread const Head& head, constant Parameters& parameters, int first) {
  return CacheRows<HAS_K_SCALE>{
      head.key, parameters.key.row, first, head.page_table, parameters.last_page, head.k_scale, parameters.k_scale.row};
}

inline CacheRows<HAS_V_SCALE> value_rows(thread const Head& head, constant Parameters& parameters, int first) {
  return CacheRows<HAS_V_SCALE>{
      head.value, parameters.value.row, first, head.page_table, parameters.last_page, head.v_scale,
      parameters.v_scale.row};
}

inline Rows query_rows(thread const Head& head, constant Parameters& parameters, int first) {
  return Rows{head.query + first * long(parameters.query.row), parameters.query.row};
}
