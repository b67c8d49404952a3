// The arrays that every kernel of attention takes, and the part of them that one (batch entry, head) sees.
//
// An array that the call does not have is bound to one element, which no kernel reads: HAS_BIAS and the like are 0 in
// the source, so the code that would read it is compiled away.
#pragma once

#include "parameters.h"
#include "tiles.h"

/// Sums of offsets, lengths and sides of a window do not wrap.
constexpr constant int OFFSET_LIMIT = 1 << 30;

/// The type of keys and values: that of queries, unless a paged cache has another.
typedef CACHE_SCALAR CacheScalar;
typedef BIAS_SCALAR BiasScalar;
typedef D_BIAS_SCALAR DBiasScalar;

/// X(element, name, buffer). The ranges are the smallest and the largest segment of each 8 queries or keys; key_tiles are
/// the lists of each LISTED_TILE queries, query_tiles those of as many keys (walk.h), with their masks (tile_mask.h).
#define FOR_EACH_OPERAND(X)        \
  X(Scalar, query, 0)              \
  X(CacheScalar, key, 1)           \
  X(CacheScalar, value, 2)         \
  X(BiasScalar, bias, 3)           \
  X(uchar, mask, 4)                \
  X(float, scale, 5)               \
  X(float, alibi_slopes, 6)        \
  X(int, query_offset, 7)          \
  X(int, query_lengths, 8)         \
  X(int, key_lengths, 9)           \
  X(int, query_segments, 10)       \
  X(int, key_segments, 11)         \
  X(int, query_segment_ranges, 12) \
  X(int, key_segment_ranges, 13)   \
  X(int, key_tiles, 14)            \
  X(int, query_tiles, 15)          \
  X(uint, tile_masks, 16)          \
  X(int, page_table, 17)           \
  X(float, k_scale, 18)            \
  X(float, v_scale, 19)

#define AS_MEMBER(ELEMENT, NAME, BUFFER) device const ELEMENT* NAME;
#define AS_ARGUMENT(ELEMENT, NAME, BUFFER) device const ELEMENT* NAME [[buffer(BUFFER)]],
#define AS_VALUE(ELEMENT, NAME, BUFFER) NAME,

struct Operands {
  FOR_EACH_OPERAND(AS_MEMBER)
};

/// What the entry points declare first and last.
#define OPERAND_ARGUMENTS FOR_EACH_OPERAND(AS_ARGUMENT)
#define THREAD_ARGUMENTS                              \
  uint3 group [[threadgroup_position_in_grid]],       \
  uint thread_index [[thread_index_in_threadgroup]],  \
  uint lane [[thread_index_in_simdgroup]],            \
  uint simdgroup [[simdgroup_index_in_threadgroup]]
#define OPERANDS \
  { FOR_EACH_OPERAND(AS_VALUE) }

/// One batch entry and one query head of the call.
struct Head {
  device const Scalar* query;
  device const CacheScalar* key;
  device const CacheScalar* value;
  device const BiasScalar* bias;
  device const uchar* mask;
  device const int* query_segments;
  device const int* key_segments;
  device const int* query_segment_ranges;
  device const int* key_segment_ranges;
  device const int* key_tiles;
  device const int* query_tiles;
  device const uint* tile_masks;
  device const int* page_table;
  device const float* k_scale;
  device const float* v_scale;
  /// The offset of this head in [B, N, T].
  long rows;
  float scale;
  float alibi_slope;
  /// Query i has position i + offset among the keys.
  int offset;
  /// Queries and keys from these indices on are padding, or do not exist.
  int query_limit;
  int key_limit;
};

inline Head head_of(thread const Operands& operands, constant Parameters& parameters, int batch, int head) {
  Head own;
  int key_head = head / parameters.group;
  own.query = operands.query + batch * parameters.query.batch + long(head) * parameters.query.head;
  own.key = operands.key + batch * parameters.key.batch + long(key_head) * parameters.key.head;
  own.value = operands.value + batch * parameters.value.batch + long(key_head) * parameters.value.head;
  if (PAGES_INTERLEAVED) {
    own.value += HEAD_DIM;
  }
  own.bias = operands.bias + batch * parameters.bias.batch + head * parameters.bias.head;
  own.mask = operands.mask + batch * parameters.mask.batch + head * parameters.mask.head;
  own.query_segments = operands.query_segments + long(batch) * parameters.query_segments_stride;
  own.key_segments = operands.key_segments + long(batch) * parameters.key_segments_stride;
  own.query_segment_ranges = operands.query_segment_ranges + long(batch) * parameters.query_segment_ranges_stride;
  own.key_segment_ranges = operands.key_segment_ranges + long(batch) * parameters.key_segment_ranges_stride;
  own.key_tiles = operands.key_tiles + batch * parameters.key_tiles.batch + head * parameters.key_tiles.head;
  own.query_tiles = operands.query_tiles + batch * parameters.query_tiles.batch + head * parameters.query_tiles.head;
  own.tile_masks = operands.tile_masks + batch * parameters.tile_masks.batch + head * parameters.tile_masks.head;
  own.page_table = operands.page_table + long(batch) * parameters.page_table_stride;
  own.k_scale = operands.k_scale + batch * parameters.k_scale.batch + key_head * parameters.k_scale.head;
  own.v_scale = operands.v_scale + batch * parameters.v_scale.batch + key_head * parameters.v_scale.head;
  own.rows = (long(batch) * parameters.heads + head) * parameters.queries;
  own.scale = SCALE_IS_ARRAY ? operands.scale[batch * parameters.scale_stride] : parameters.scale;
  own.alibi_slope = HAS_ALIBI ? operands.alibi_slopes[batch * parameters.alibi_slopes_stride + head] : 0.0f;
  own.offset = parameters.query_offset;
  if (OFFSET_IS_ARRAY) {
    own.offset = clamp(operands.query_offset[batch * parameters.query_offset_stride], -OFFSET_LIMIT, OFFSET_LIMIT);
  }
  own.query_limit = parameters.queries;
  own.key_limit = parameters.keys;
  if (HAS_QUERY_LENGTHS) {
    own.query_limit = clamp(operands.query_lengths[batch * parameters.query_lengths_stride], 0, parameters.queries);
  }
  if (HAS_KEY_LENGTHS) {
    own.key_limit = clamp(operands.key_lengths[batch * parameters.key_lengths_stride], 0, parameters.keys);
  }
  return own;
}
