// The mask of a listed tile: a bit for each of its pairs, True where a mask function shows it.
//
// A tile has LISTED_TILE queries and as many keys. Each query has four words in a row, and each word 32 keys, the first
// in the lowest bit. Only tiles that are seen in part have a mask; it is all that a shader knows of the function.
#pragma once

#include <metal_stdlib>
using namespace metal;

constexpr constant int WORDS_PER_QUERY = LISTED_TILE / 32;
constexpr constant int WORDS_PER_MASK = LISTED_TILE * WORDS_PER_QUERY;

enum class TileCoverage { NONE, PARTIAL, FULL };

/// The word that has the bit of a query and a key, by their indices in their sequences.
inline uint mask_word(device const uint* mask, int query, int key) {
  return mask[query % LISTED_TILE * WORDS_PER_QUERY + key % LISTED_TILE / 32];
}

inline bool mask_bit(device const uint* mask, int query, int key) {
  return (mask_word(mask, query, key) >> (key % 32) & 1) != 0;
}

/// What the mask shows of a part of a tile, at most 32 queries by 32 keys in one word. All threads of a SIMD-group must
/// call.
template <int QUERIES, int KEYS>
TileCoverage mask_coverage(device const uint* mask, int first_query, int first_key, uint lane) {
  static_assert(QUERIES <= 32 && KEYS <= 32, "a lane has one word");
  constexpr uint EVERY = 0xffffffffu >> (32 - KEYS);
  uint seen = 0, all = 0;
  if (int(lane) < QUERIES) {
    seen = mask_word(mask, first_query + int(lane), first_key) >> (first_key % 32) & EVERY;
    all = EVERY;
  }
  if (!simd_any(seen != 0)) {
    return TileCoverage::NONE;
  }
  return simd_all(seen == all) ? TileCoverage::FULL : TileCoverage::PARTIAL;
}
