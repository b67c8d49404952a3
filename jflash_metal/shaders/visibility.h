// The rule of which keys a query may see, for one query and one key of a tile.
#pragma once

#include "pages.h"
#include "tile_mask.h"

/// A tile that a block visits.
struct Visit {
  /// Its first key, or its first query where keys own the block.
  int first;
  /// Whether every pair is visible, so that none is asked for.
  bool is_full;
  /// The mask of the listed tile that it lies in, if the call has a mask function.
  device const uint* mask;
};

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
    thread const Visit& tile,
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const RowMetadata& query_metadata,
    threadgroup const RowMetadata& key_metadata) {
  if (tile.is_full) {
    return true;
  }
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
  if (HAS_MASK_MOD) {
    result = result && mask_bit(tile.mask, query, key);
  }
  return result;
}
