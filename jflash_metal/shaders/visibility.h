// Which keys a query may see, and which tiles of one side a block of the other side has to visit.
//
// `visible` is the rule for one query and one key. `visible_keys` and `visible_queries` are the same rule for a block:
// no pair outside [start, stop) is visible, so those tiles are never visited; every pair inside [full_start, full_stop)
// is visible, so those tiles are not masked.
#pragma once

#include "operands.h"

/// What the rule and the logits need of a query or of a key, beside its row. It lies in threadgroup memory, as the
/// threads of a row share it. Fields that the call does not use are neither written nor read.
struct RowMetadata {
  int segment;
  /// A key's value of a bias or mask [.., 1, S], a query's of one [.., T, 1].
  float bias;
  bool mask;
  /// Numbers of queries only, in the backward.
  float lse;
  float delta;
};

/// Whether a bias or a mask is [.., T, 1] or [1, 1], [.., 1, S], or [.., T, S].
constexpr constant bool BIAS_OF_QUERIES = HAS_BIAS && !BIAS_BY_KEY;
constexpr constant bool BIAS_OF_KEYS = HAS_BIAS && BIAS_BY_KEY && !BIAS_BY_QUERY;
constexpr constant bool BIAS_OF_PAIRS = HAS_BIAS && BIAS_BY_KEY && BIAS_BY_QUERY;
constexpr constant bool MASK_OF_QUERIES = HAS_MASK && !MASK_BY_KEY;
constexpr constant bool MASK_OF_KEYS = HAS_MASK && MASK_BY_KEY && !MASK_BY_QUERY;
constexpr constant bool MASK_OF_PAIRS = HAS_MASK && MASK_BY_KEY && MASK_BY_QUERY;

/// Loads the metadata of COUNT queries from `first` on. Metadata of queries past the last one is never used.
template <int COUNT>
void load_query_metadata(
    threadgroup RowMetadata* metadata,
    thread const Head& head,
    constant Parameters& parameters,
    int first,
    uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    int query = min(first + index, parameters.queries - 1);
    if (HAS_SEGMENTS) {
      metadata[index].segment = head.query_segments[query];
    }
    if (BIAS_OF_QUERIES) {
      metadata[index].bias = float(head.bias[query * parameters.bias.query]);
    }
    if (MASK_OF_QUERIES) {
      metadata[index].mask = head.mask[query * parameters.mask.query] != 0;
    }
  }
}

/// Loads the metadata of COUNT keys from `first` on.
template <int COUNT>
void load_key_metadata(
    threadgroup RowMetadata* metadata,
    thread const Head& head,
    constant Parameters& parameters,
    int first,
    uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    int key = min(first + index, parameters.keys - 1);
    if (HAS_SEGMENTS) {
      metadata[index].segment = head.key_segments[key];
    }
    if (BIAS_OF_KEYS) {
      metadata[index].bias = float(head.bias[key * parameters.bias.key]);
    }
    if (MASK_OF_KEYS) {
      metadata[index].mask = head.mask[key * parameters.mask.key] != 0;
    }
  }
}

inline bool visible(
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const RowMetadata& query_metadata,
    threadgroup const RowMetadata& key_metadata) {
  bool result = query < head.query_limit && key < head.key_limit;
  int distance = key - (query + head.offset);
  if (HAS_LEFT) {
    result = result && distance >= -parameters.left;
  }
  if (HAS_RIGHT) {
    result = result && distance <= parameters.right;
  }
  if (HAS_SEGMENTS) {
    result = result && query_metadata.segment == key_metadata.segment;
  }
  if (MASK_OF_QUERIES) {
    result = result && query_metadata.mask;
  }
  if (MASK_OF_KEYS) {
    result = result && key_metadata.mask;
  }
  if (MASK_OF_PAIRS) {
    result = result && head.mask[query * parameters.mask.query + key * parameters.mask.key] != 0;
  }
  return result;
}

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

/// The segment range of COUNT queries or keys from `first` on, a multiple of eight. All threads of a SIMD-group must call.
template <int COUNT>
SegmentRange segment_range(device const int* ranges, int first, int length, uint lane) {
  SegmentRange segments = {0x7fffffff, -0x7fffffff - 1};
  int index = first / 8 + int(lane);
  if (int(lane) < COUNT / 8 && 8 * index < length) {
    segments = SegmentRange{ranges[2 * index], ranges[2 * index + 1]};
  }
  return SegmentRange{simd_min(segments.least), simd_max(segments.most)};
}

enum class TileCoverage { NONE, PARTIAL, FULL };

/// The coverage of a tile of COLUMNS at `first`; `own` is the block's segment range, if the call has segments.
template <int COLUMNS>
TileCoverage tile_coverage(
    TileRange range, int first, SegmentRange own, device const int* ranges, int length, uint lane) {
  bool all = first >= range.full_start && first + COLUMNS <= range.full_stop;
  if (HAS_SEGMENTS) {
    SegmentRange other = segment_range<COLUMNS>(ranges, first, length, lane);
    if (other.most < own.least || other.least > own.most) {
      return TileCoverage::NONE;
    }
    all = all && own.least == own.most && other.least == other.most && own.least == other.least;
  }
  return all ? TileCoverage::FULL : TileCoverage::PARTIAL;
}
