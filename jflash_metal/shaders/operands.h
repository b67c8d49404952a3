// The arrays that every kernel of attention takes, and those of their facts that one (batch entry, head) sees.
//
// An array that the call does not have is one element that nobody reads: its name is a 0 in the source (HAS_BIAS, ...),
// so all that would be done with it is compiled away.
#pragma once

#include "parameters.h"
#include "tiles.h"

typedef BIAS_SCALAR BiasScalar;

struct Operands {
  device const Scalar* query;
  device const Scalar* key;
  device const Scalar* value;
  device const BiasScalar* bias;
  device const uchar* mask;
  device const float* scale;
  device const float* alibi_slopes;
  device const int* query_offset;
  device const int* query_lengths;
  device const int* key_lengths;
  device const int* query_segments;
  device const int* key_segments;
  /// Smallest and largest segment of each 8 queries or keys.
  device const int* query_ranges;
  device const int* key_ranges;
};

/// The call as one batch entry and one query head see it.
struct Head {
  device const Scalar* query;
  device const Scalar* key;
  device const Scalar* value;
  device const BiasScalar* bias;
  device const uchar* mask;
  device const int* query_segments;
  device const int* key_segments;
  device const int* query_ranges;
  device const int* key_ranges;
  /// Where this head's row of [B, N, T] begins.
  long rows;
  float scale;
  float alibi_slope;
  /// Query i stands among the keys at i + offset.
  int offset;
  /// Queries and keys from here on are padding, or do not exist.
  int query_limit;
  int key_limit;
};

inline Head head_of(thread const Operands& operands, constant Parameters& parameters, int batch, int head) {
  Head own;
  int key_head = head / parameters.group;
  own.query = operands.query + batch * parameters.query.batch + long(head) * parameters.query.head;
  own.key = operands.key + batch * parameters.key.batch + long(key_head) * parameters.key.head;
  own.value = operands.value + batch * parameters.value.batch + long(key_head) * parameters.value.head;
  own.bias = operands.bias + batch * parameters.bias.batch + head * parameters.bias.head;
  own.mask = operands.mask + batch * parameters.mask.batch + head * parameters.mask.head;
  own.query_segments = operands.query_segments + long(batch) * parameters.query_segments_stride;
  own.key_segments = operands.key_segments + long(batch) * parameters.key_segments_stride;
  own.query_ranges = operands.query_ranges + long(batch) * parameters.query_ranges_stride;
  own.key_ranges = operands.key_ranges + long(batch) * parameters.key_ranges_stride;
  own.rows = (long(batch) * parameters.heads + head) * parameters.queries;
  own.scale = SCALE_IS_ARRAY ? operands.scale[batch * parameters.scale_stride] : parameters.scale;
  own.alibi_slope = HAS_ALIBI ? operands.alibi_slopes[batch * parameters.alibi_slopes_stride + head] : 0.0f;
  own.offset = OFFSET_IS_ARRAY ? operands.query_offset[batch * parameters.query_offset_stride] : parameters.query_offset;
  own.query_limit = parameters.queries;
  own.key_limit = parameters.keys;
  if (HAS_QUERY_LENGTHS) {
    own.query_limit = operands.query_lengths[batch * parameters.query_lengths_stride];
  }
  if (HAS_KEY_LENGTHS) {
    own.key_limit = operands.key_lengths[batch * parameters.key_lengths_stride];
  }
  return own;
}
