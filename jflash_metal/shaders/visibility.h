// Which keys a query may see, and which stretch of one side a block of the other need be shown.
//
// `seen` is the rule, for one query and one key. `keys_of` and `queries_of` are the same rule for a block: outside
// [start, stop) nobody sees anybody, so those tiles are never visited; inside [whole_start, whole_stop) everybody sees
// everybody, so there the rule is not asked.
#pragma once

#include "operands.h"

/// What a query, or a key, brings to the rule and to its logits besides its row; in threadgroup memory, as a row's many
/// threads share it. Parts that the call does not have are neither written nor read.
struct Facts {
  int segment;
  /// Of a bias or mask that is the same for all queries the keys', of one that is the same for all keys the queries'.
  float bias;
  bool mask;
  /// Of queries, in the backward.
  float lse;
  float delta;
};

/// Whether a bias or a mask is [T, 1], or [1, S], or one number.
constexpr constant bool BIAS_OF_QUERIES = HAS_BIAS && !BIAS_BY_KEY;
constexpr constant bool BIAS_OF_KEYS = HAS_BIAS && BIAS_BY_KEY && !BIAS_BY_QUERY;
constexpr constant bool BIAS_OF_PAIRS = HAS_BIAS && BIAS_BY_KEY && BIAS_BY_QUERY;
constexpr constant bool MASK_OF_QUERIES = HAS_MASK && !MASK_BY_KEY;
constexpr constant bool MASK_OF_KEYS = HAS_MASK && MASK_BY_KEY && !MASK_BY_QUERY;
constexpr constant bool MASK_OF_PAIRS = HAS_MASK && MASK_BY_KEY && MASK_BY_QUERY;

/// Facts of queries first, first + 1, ...; of those from `query_limit` on they mean nothing.
template <int COUNT>
void stage_query_facts(
    threadgroup Facts* facts, thread const Head& head, constant Parameters& parameters, int first, uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    int query = min(first + index, parameters.queries - 1);
    if (HAS_SEGMENTS) {
      facts[index].segment = head.query_segments[query];
    }
    if (BIAS_OF_QUERIES) {
      facts[index].bias = float(head.bias[query * parameters.bias.query]);
    }
    if (MASK_OF_QUERIES) {
      facts[index].mask = head.mask[query * parameters.mask.query] != 0;
    }
  }
}

/// The same of keys.
template <int COUNT>
void stage_key_facts(
    threadgroup Facts* facts, thread const Head& head, constant Parameters& parameters, int first, uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    int key = min(first + index, parameters.keys - 1);
    if (HAS_SEGMENTS) {
      facts[index].segment = head.key_segments[key];
    }
    if (BIAS_OF_KEYS) {
      facts[index].bias = float(head.bias[key * parameters.bias.key]);
    }
    if (MASK_OF_KEYS) {
      facts[index].mask = head.mask[key * parameters.mask.key] != 0;
    }
  }
}

inline bool seen(
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const Facts& query_facts,
    threadgroup const Facts& key_facts) {
  bool result = query < head.query_limit && key < head.key_limit;
  int distance = key - (query + head.offset);
  if (HAS_LEFT) {
    result = result && distance >= -parameters.left;
  }
  if (HAS_RIGHT) {
    result = result && distance <= parameters.right;
  }
  if (HAS_SEGMENTS) {
    result = result && query_facts.segment == key_facts.segment;
  }
  if (MASK_OF_QUERIES) {
    result = result && query_facts.mask;
  }
  if (MASK_OF_KEYS) {
    result = result && key_facts.mask;
  }
  if (MASK_OF_PAIRS) {
    result = result && head.mask[query * parameters.mask.query + key * parameters.mask.key] != 0;
  }
  return result;
}

/// 0 <= start <= stop <= the limit; the whole stretch may be empty.
struct Span {
  int start;
  int stop;
  int whole_start;
  int whole_stop;
};

/// The stretch of `limit` that lies `least` to `most` from every one, or from any one, of first ... last.
/// 64-bit, as positions and bounds add up to more than 32 bits hold.
inline Span span_between(
    int first, int last, int limit, bool is_bounded_below, long least, bool is_bounded_above, long most, bool exists) {
  long start = 0, stop = limit, whole_start = 0, whole_stop = limit;
  if (is_bounded_below) {
    start = max(start, first + least);
    whole_start = max(whole_start, last + least);
  }
  if (is_bounded_above) {
    stop = min(stop, last + most + 1);
    whole_stop = min(whole_stop, first + most + 1);
  }
  // Eight keys have one range of segments, so tiles begin at multiples of eight.
  start = start / 8 * 8;
  if (!exists || stop <= start) {
    return Span{0, 0, 0, 0};
  }
  return Span{int(start), int(stop), int(min(whole_start, stop)), int(max(whole_stop, start))};
}

/// The keys that queries first ... first + count - 1 see.
inline Span keys_of(thread const Head& head, constant Parameters& parameters, int first, int count) {
  int last = first + count - 1;
  Span span = span_between(
      first, last, head.key_limit,
      HAS_LEFT, long(head.offset) - parameters.left, HAS_RIGHT, long(head.offset) + parameters.right,
      first < head.query_limit);
  if (HAS_MASK || last >= head.query_limit) {
    span.whole_stop = span.whole_start;
  }
  return span;
}

/// The queries that see keys first ... first + count - 1.
inline Span queries_of(thread const Head& head, constant Parameters& parameters, int first, int count) {
  int last = first + count - 1;
  Span span = span_between(
      first, last, head.query_limit,
      HAS_RIGHT, -long(head.offset) - parameters.right, HAS_LEFT, -long(head.offset) + parameters.left,
      first < head.key_limit);
  if (HAS_MASK || last >= head.key_limit) {
    span.whole_stop = span.whole_start;
  }
  return span;
}

/// Smallest and largest segment of a tile.
struct Range {
  int least;
  int most;
};

/// Of COUNT queries or keys, from a multiple of eight on. All threads of a SIMD-group ask together.
template <int COUNT>
Range range_of(device const int* ranges, int first, int length, uint lane) {
  Range range = {0x7fffffff, -0x7fffffff - 1};
  int index = first / 8 + int(lane);
  if (int(lane) < COUNT / 8 && 8 * index < length) {
    range = Range{ranges[2 * index], ranges[2 * index + 1]};
  }
  return Range{simd_min(range.least), simd_max(range.most)};
}

enum class Sight { NONE, SOME, ALL };

/// What a block sees of a tile of COLUMNS at `first`; `own` is the block's range of segments, where there are any.
template <int COLUMNS>
Sight sight_of(Span span, int first, Range own, device const int* ranges, int length, uint lane) {
  bool all = first >= span.whole_start && first + COLUMNS <= span.whole_stop;
  if (HAS_SEGMENTS) {
    Range other = range_of<COLUMNS>(ranges, first, length, lane);
    if (other.most < own.least || other.least > own.most) {
      return Sight::NONE;
    }
    all = all && own.least == own.most && other.least == other.most && own.least == other.least;
  }
  return all ? Sight::ALL : Sight::SOME;
}
