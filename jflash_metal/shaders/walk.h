// What a block visits: tiles of the other side, in order.
//
//   for each tile of COLUMNS in the block's range; or, if the call has lists, of each listed tile of the block's list:
//     skip it if bounds, lengths, segments or the mask function show nothing of it
//     it is full if the list says so, or if all of them show all
//
// A dense mask and a mask function leave tiles empty anywhere, so with them LISTED_TILE rows have a list of the tiles of
// LISTED_TILE columns that show something: [how many, 2 * tile + is_partial, ...], in order. A block lies in one such
// tile's rows, and several tiles of COLUMNS in its columns.
#pragma once

#include "tile_range.h"

/// The number of listed tiles in `length` rows or columns.
inline int listed_tiles(int length) { return (length + LISTED_TILE - 1) / LISTED_TILE; }

/// The walk of a block of ROWS over tiles of COLUMNS. ROWS are queries, and COLUMNS keys, or the other way round.
template <int ROWS, int COLUMNS, bool ROWS_ARE_QUERIES>
struct Walk {
  TileRange range;
  /// The segment range of the block, and those of each 8 columns.
  SegmentRange segments;
  device const int* segment_ranges;
  /// The number of columns.
  int length;
  int first_row;
  /// The block's list: how many tiles, and an entry for each; if the call has lists.
  device const int* list;
  /// The masks of all listed tiles, if the call has a mask function. Neighbours in memory have the same queries.
  device const uint* masks;
  int tiles_of_keys;
  /// The number of tiles that were looked at.
  int step;

  /// Goes on to the next tile, if there is one. All threads of a SIMD-group must call.
  bool next(thread Visit& tile, uint lane) {
    constexpr int STEPS = LISTED_TILE / COLUMNS;
    int steps = HAS_LISTS ? list[0] * STEPS : (range.stop - range.start + COLUMNS - 1) / COLUMNS;
    while (step < steps) {
      int entry = HAS_LISTS ? list[1 + step / STEPS] : 0;
      int first = HAS_LISTS ? entry / 2 * LISTED_TILE + step % STEPS * COLUMNS : range.start + step * COLUMNS;
      ++step;
      if (visits(tile, first, entry, lane)) {
        return true;
      }
    }
    return false;
  }

  /// Goes to the tile at `first`, if the block visits it. All threads of a SIMD-group must call.
  bool find(thread Visit& tile, int first, uint lane) {
    int entry = 0;
    if (HAS_LISTS) {
      int found = -1;
      for (int index = 1 + int(lane); index <= list[0]; index += 32) {
        found = list[index] / 2 == first / LISTED_TILE ? list[index] : found;
      }
      entry = simd_max(found);
    }
    return entry >= 0 && visits(tile, first, entry, lane);
  }

  /// Whether the tile at `first` shows anything, which is then `tile`. `entry` is the list's.
  bool visits(thread Visit& tile, int first, int entry, uint lane) {
    if (first >= range.stop || first + COLUMNS <= range.start) {
      return false;
    }
    bool listed_full = HAS_LISTS && entry % 2 == 0;
    device const uint* mask = nullptr;
    TileCoverage by_segments = segment_coverage(segments, segment_range<COLUMNS>(segment_ranges, first, length, lane));
    TileCoverage by_mask = TileCoverage::FULL;
    if (HAS_MASK_MOD && !listed_full) {
      constexpr int QUERIES = ROWS_ARE_QUERIES ? ROWS : COLUMNS, KEYS = ROWS_ARE_QUERIES ? COLUMNS : ROWS;
      int query = ROWS_ARE_QUERIES ? first_row : first, key = ROWS_ARE_QUERIES ? first : first_row;
      mask = masks + (long(query / LISTED_TILE) * tiles_of_keys + key / LISTED_TILE) * WORDS_PER_MASK;
      by_mask = mask_coverage<QUERIES, KEYS>(mask, query, key, lane);
    }
    bool in_range = first >= range.full_start && first + COLUMNS <= range.full_stop;
    bool all_full = in_range && by_segments == TileCoverage::FULL && by_mask == TileCoverage::FULL;
    tile = Visit{first, listed_full || all_full, mask};
    return by_segments != TileCoverage::NONE && by_mask != TileCoverage::NONE;
  }
};

/// The walk of ROWS queries from `first` on over tiles of COLUMNS keys. All threads of a SIMD-group must call.
template <int ROWS, int COLUMNS>
Walk<ROWS, COLUMNS, true> walk_keys(thread const Head& head, constant Parameters& parameters, int first, uint lane) {
  return Walk<ROWS, COLUMNS, true>{
      visible_keys(head, parameters, first, ROWS),
      segment_range<ROWS>(head.query_segment_ranges, first, parameters.queries, lane),
      head.key_segment_ranges,
      parameters.keys,
      first,
      head.key_tiles + first / LISTED_TILE * long(1 + listed_tiles(parameters.keys)),
      head.tile_masks,
      listed_tiles(parameters.keys),
      0};
}

/// The walk of ROWS keys from `first` on over tiles of COLUMNS queries. All threads of a SIMD-group must call.
template <int ROWS, int COLUMNS>
Walk<ROWS, COLUMNS, false> walk_queries(thread const Head& head, constant Parameters& parameters, int first, uint lane) {
  return Walk<ROWS, COLUMNS, false>{
      visible_queries(head, parameters, first, ROWS),
      segment_range<ROWS>(head.key_segment_ranges, first, parameters.keys, lane),
      head.query_segment_ranges,
      parameters.queries,
      first,
      head.query_tiles + first / LISTED_TILE * long(1 + listed_tiles(parameters.queries)),
      head.tile_masks,
      listed_tiles(parameters.keys),
      0};
}
