// The entry points of the backward, in the order in which they run.
#include "d_bias.h"
#include "d_key_value.h"
#include "d_query.h"
#include "delta.h"

/// Of tiles of both sorts, or of the larger one where both do not fit.
constexpr int stream_size(int streams, int columns) {
  return streams == 2 ? tile_size(columns, HEAD_DIM) + tile_size(columns, VALUE_DIM)
                      : tile_size(columns, HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM);
}
constexpr int second_stream(int streams, int columns) { return streams == 2 ? tile_size(columns, HEAD_DIM) : 0; }

// One SIMD-group for each query of a head.
kernel void delta(
    device const Scalar* out [[buffer(0)]],
    device const Scalar* d_out [[buffer(1)]],
    device const float* lse [[buffer(2)]],
    device const float* d_lse [[buffer(3)]],
    device float* result [[buffer(4)]],
    constant Parameters& parameters [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  delta_row(
      out, d_out, lse, d_lse, result, parameters, int(group.z), int(group.y), int(group.x * SIMDGROUPS + simdgroup), lane);
}

// One threadgroup for each block of queries, head and batch entry.
kernel void d_query(
    device const Scalar* query [[buffer(0)]],
    device const Scalar* key [[buffer(1)]],
    device const Scalar* value [[buffer(2)]],
    device const BiasScalar* bias [[buffer(3)]],
    device const uchar* mask [[buffer(4)]],
    device const float* scale [[buffer(5)]],
    device const float* alibi_slopes [[buffer(6)]],
    device const int* query_offset [[buffer(7)]],
    device const int* query_lengths [[buffer(8)]],
    device const int* key_lengths [[buffer(9)]],
    device const int* query_segments [[buffer(10)]],
    device const int* key_segments [[buffer(11)]],
    device const int* query_ranges [[buffer(12)]],
    device const int* key_ranges [[buffer(13)]],
    device const Scalar* d_out [[buffer(14)]],
    device const float* lse [[buffer(15)]],
    device const float* delta [[buffer(16)]],
    device Scalar* d_query [[buffer(17)]],
#if WANT_BIAS_PAIRS
    device BiasScalar* d_bias [[buffer(D_BIAS_BUFFER)]],
#endif
#if WANT_BIAS_ROWS
    device float* d_bias_rows [[buffer(D_BIAS_ROWS_BUFFER)]],
#endif
#if WANT_SLOPES
    device float* d_slope_rows [[buffer(D_SLOPE_ROWS_BUFFER)]],
#endif
#if WANT_SCALE
    device float* d_scale_rows [[buffer(D_SCALE_ROWS_BUFFER)]],
#endif
    constant Parameters& parameters [[buffer(D_QUERY_PARAMETERS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Scalar4 own_heads[tile_size(D_QUERY_ROWS, HEAD_DIM)];
  threadgroup Scalar4 own_values[tile_size(D_QUERY_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_QUERY_STREAMS, D_QUERY_COLUMNS)];
  threadgroup float products[D_QUERY_ROWS * product_stride(D_QUERY_COLUMNS)];
  threadgroup float d_weights[D_QUERY_ROWS * product_stride(D_QUERY_COLUMNS)];
  threadgroup Facts own_facts[D_QUERY_ROWS];
  threadgroup Facts stream_facts[D_QUERY_COLUMNS];
  threadgroup Scalar4 d_scores[tile_size(D_QUERY_ROWS, D_QUERY_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  BackwardMemory memory = {
      (threadgroup Scalar*)own_heads, (threadgroup Scalar*)own_values, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_QUERY_STREAMS, D_QUERY_COLUMNS)), products, d_weights, own_facts,
      stream_facts};
  Operands operands = {
      query, key, value, bias, mask, scale, alibi_slopes, query_offset, query_lengths, key_lengths, query_segments,
      key_segments, query_ranges, key_ranges};
  int batch = int(group.z), head_index = int(group.y);
  Head head = head_of(operands, parameters, batch, head_index);
  QueryGradients gradients = {};
  gradients.d_query = d_query + batch * parameters.query.batch + long(head_index) * parameters.query.head;
#if WANT_BIAS_PAIRS
  gradients.d_bias = d_bias + head.rows * parameters.keys;
#endif
#if WANT_BIAS_ROWS
  gradients.d_bias_rows = d_bias_rows + head.rows;
#endif
#if WANT_SLOPES
  gradients.d_slope_rows = d_slope_rows + head.rows;
#endif
#if WANT_SCALE
  gradients.d_scale_rows = d_scale_rows + head.rows;
#endif
  d_query_block(
      memory, (threadgroup Scalar*)d_scores, scratch + simdgroup * 64, head,
      residuals_of(d_out, lse, delta, head, parameters, batch, head_index), parameters, gradients,
      int(group.x) * D_QUERY_ROWS, worker_at<D_QUERY_ROWS>(thread_index, lane, simdgroup));
}

// One threadgroup for each block of keys, key head and batch entry.
kernel void d_key_value(
    device const Scalar* query [[buffer(0)]],
    device const Scalar* key [[buffer(1)]],
    device const Scalar* value [[buffer(2)]],
    device const BiasScalar* bias [[buffer(3)]],
    device const uchar* mask [[buffer(4)]],
    device const float* scale [[buffer(5)]],
    device const float* alibi_slopes [[buffer(6)]],
    device const int* query_offset [[buffer(7)]],
    device const int* query_lengths [[buffer(8)]],
    device const int* key_lengths [[buffer(9)]],
    device const int* query_segments [[buffer(10)]],
    device const int* key_segments [[buffer(11)]],
    device const int* query_ranges [[buffer(12)]],
    device const int* key_ranges [[buffer(13)]],
    device const Scalar* d_out [[buffer(14)]],
    device const float* lse [[buffer(15)]],
    device const float* delta [[buffer(16)]],
    device Scalar* d_key [[buffer(17)]],
    device Scalar* d_value [[buffer(18)]],
#if WANT_BIAS_COLUMNS
    device float* d_bias_columns [[buffer(19)]],
    constant Parameters& parameters [[buffer(20)]],
#else
    constant Parameters& parameters [[buffer(19)]],
#endif
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Scalar4 own_heads[tile_size(D_KEY_VALUE_ROWS, HEAD_DIM)];
  threadgroup Scalar4 own_values[tile_size(D_KEY_VALUE_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_KEY_VALUE_STREAMS, D_KEY_VALUE_COLUMNS)];
  threadgroup float products[D_KEY_VALUE_ROWS * product_stride(D_KEY_VALUE_COLUMNS)];
  threadgroup float d_weights[D_KEY_VALUE_ROWS * product_stride(D_KEY_VALUE_COLUMNS)];
  threadgroup Facts own_facts[D_KEY_VALUE_ROWS];
  threadgroup Facts stream_facts[D_KEY_VALUE_COLUMNS];
  threadgroup Scalar4 weights[tile_size(D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS)];
  threadgroup Scalar4 d_scores[tile_size(D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  BackwardMemory memory = {
      (threadgroup Scalar*)own_heads, (threadgroup Scalar*)own_values, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_KEY_VALUE_STREAMS, D_KEY_VALUE_COLUMNS)), products, d_weights, own_facts,
      stream_facts};
  Operands operands = {
      query, key, value, bias, mask, scale, alibi_slopes, query_offset, query_lengths, key_lengths, query_segments,
      key_segments, query_ranges, key_ranges};
  int batch = int(group.z), key_head = int(group.y);
  KeyGradients gradients = {};
  gradients.d_key = d_key + batch * parameters.key.batch + long(key_head) * parameters.key.head;
  gradients.d_value = d_value + batch * parameters.value.batch + long(key_head) * parameters.value.head;
#if WANT_BIAS_COLUMNS
  gradients.d_bias_columns = d_bias_columns;
#endif
  d_key_value_block(
      memory, (threadgroup Scalar*)weights, (threadgroup Scalar*)d_scores, scratch + simdgroup * 64, operands, d_out, lse,
      delta, parameters, gradients, batch, key_head, int(group.x) * D_KEY_VALUE_ROWS,
      worker_at<D_KEY_VALUE_ROWS>(thread_index, lane, simdgroup));
}

#if WANT_BIAS_SHARED
// One threadgroup for each block of keys, block of queries and [T, S] of the bias.
kernel void d_bias(
    device const Scalar* query [[buffer(0)]],
    device const Scalar* key [[buffer(1)]],
    device const Scalar* value [[buffer(2)]],
    device const BiasScalar* bias [[buffer(3)]],
    device const uchar* mask [[buffer(4)]],
    device const float* scale [[buffer(5)]],
    device const float* alibi_slopes [[buffer(6)]],
    device const int* query_offset [[buffer(7)]],
    device const int* query_lengths [[buffer(8)]],
    device const int* key_lengths [[buffer(9)]],
    device const int* query_segments [[buffer(10)]],
    device const int* key_segments [[buffer(11)]],
    device const int* query_ranges [[buffer(12)]],
    device const int* key_ranges [[buffer(13)]],
    device const Scalar* d_out [[buffer(14)]],
    device const float* lse [[buffer(15)]],
    device const float* delta [[buffer(16)]],
    device BiasScalar* d_bias [[buffer(17)]],
    constant Parameters& parameters [[buffer(18)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Scalar4 own_heads[tile_size(D_QUERY_ROWS, HEAD_DIM)];
  threadgroup Scalar4 own_values[tile_size(D_QUERY_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_QUERY_STREAMS, D_QUERY_COLUMNS)];
  threadgroup float products[D_QUERY_ROWS * product_stride(D_QUERY_COLUMNS)];
  threadgroup float d_weights[D_QUERY_ROWS * product_stride(D_QUERY_COLUMNS)];
  threadgroup Facts own_facts[D_QUERY_ROWS];
  threadgroup Facts stream_facts[D_QUERY_COLUMNS];
  BackwardMemory memory = {
      (threadgroup Scalar*)own_heads, (threadgroup Scalar*)own_values, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_QUERY_STREAMS, D_QUERY_COLUMNS)), products, d_weights, own_facts,
      stream_facts};
  Operands operands = {
      query, key, value, bias, mask, scale, alibi_slopes, query_offset, query_lengths, key_lengths, query_segments,
      key_segments, query_ranges, key_ranges};
  int bias_batch = int(group.z) / parameters.bias_heads, bias_head = int(group.z) % parameters.bias_heads;
  d_bias_block(
      memory, operands, d_out, lse, delta, parameters, d_bias + long(group.z) * parameters.queries * parameters.keys,
      bias_batch, bias_head, int(group.y) * D_QUERY_ROWS, int(group.x) * D_QUERY_COLUMNS,
      worker_at<D_QUERY_ROWS>(thread_index, lane, simdgroup));
}
#endif
