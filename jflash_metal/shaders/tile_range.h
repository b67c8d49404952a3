// The range of tiles of one side that a block of the other side may see.
//
// `visible_keys` and `visible_queries` say what bounds and lengths allow: no pair outside [start, stop) is visible, so
// those tiles are never visited; every pair inside [full_start, full_stop) is visible, so those tiles are not masked. Of
// the tiles in a range, `segment_coverage` says which have a segment of the block.
#pragma once

#include "visibility.h"

/// 0 <= start <= stop <= the limit; the full part may be empty.
struct TileRange {
  int start;
  int stop;
  int full_start;
  int full_stop;
};

/// The part of [0, limit) at a distance of `least` to `most` from some of first ... last, and its full part, at such a
/// distance from all of them. Numbers have 64 bits, as sums of positions and bounds exceed 32.
inline TileRange range_between(
    int first, int last, int limit, bool is_bounded_below, long least, bool is_bounded_above, long most, bool exists) {
  long start = 0, stop = limit, full_start = 0, full_stop = limit;
  if (is_bounded_below) {
    start = max(start, first + least);
    full_start = max(full_start, last + least);
  }
  if (is_bounded_above) {
    stop = min(stop, last + most + 1);
    full_stop = min(full_stop, first + most + 1);
  }
  // Every eight keys have one segment range, so tiles begin at multiples of eight.
  start = start / 8 * 8;
  if (!exists || stop <= start) {
    return TileRange{0, 0, 0, 0};
  }
  return TileRange{int(start), int(stop), int(min(full_start, stop)), int(max(full_stop, start))};
}

/// The keys that `count` queries from `first` on see.
inline TileRange visible_keys(thread const Head& head, constant Parameters& parameters, int first, int count) {
  int last = first + count - 1;
  TileRange range = range_between(
      first, last, head.key_limit,
      HAS_LEFT, long(head.offset) - parameters.left, HAS_RIGHT, long(head.offset) + parameters.right,
      first < head.query_limit);
  if (HAS_MASK || last >= head.query_limit) {
    range.full_stop = range.full_start;
  }
  return range;
}

/// The queries that see `count` keys from `first` on.
inline TileRange visible_queries(thread const Head& head, constant Parameters& parameters, int first, int count) {
  int last = first + count - 1;
  TileRange range = range_between(
      first, last, head.query_limit,
      HAS_RIGHT, -long(head.offset) - parameters.right, HAS_LEFT, -long(head.offset) + parameters.left,
      first < head.key_limit);
  if (HAS_MASK || last >= head.key_limit) {
    range.full_stop = range.full_start;
  }
  return range;
}

/// The smallest and the largest segment of a tile.
struct SegmentRange {
  int least;
  int most;
};

/// The segment range of COUNT queries or keys from `first` on, a multiple of eight; without segments all are 0. All threads
/// of a SIMD-group must call.
template <int COUNT>
SegmentRange segment_range(device const int* ranges, int first, int length, uint lane) {
  if (!HAS_SEGMENTS) {
    return SegmentRange{0, 0};
  }
  SegmentRange segments = {0x7fffffff, -0x7fffffff - 1};
  int index = first / 8 + int(lane);
  if (int(lane) < COUNT / 8 && 8 * index < length) {
    segments = SegmentRange{ranges[2 * index], ranges[2 * index + 1]};
  }
  return SegmentRange{simd_min(segments.least), simd_max(segments.most)};
}

/// What segments show of a tile, from its range of them and the block's.
inline TileCoverage segment_coverage(SegmentRange own, SegmentRange other) {
  if (other.most < own.least || other.least > own.most) {
    return TileCoverage::NONE;
  }
  bool one = own.least == own.most && other.least == other.most && own.least == other.least;
  return one ? TileCoverage::FULL : TileCoverage::PARTIAL;
}
