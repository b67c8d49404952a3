// The entry points of the backward, in the order in which they run.
#include "d_bias.h"
#include "d_key_value.h"
#include "d_query.h"
#include "delta.h"

#define OPERAND_AND_RESIDUAL_ARGUMENTS         \
  OPERAND_ARGUMENTS                            \
  device const Scalar* d_out [[buffer(20)]],   \
  device const float* lse [[buffer(21)]],      \
  device const float* delta [[buffer(22)]],

/// The size of a tile of each kind, or of the larger one where both do not fit.
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
      out, d_out, lse, d_lse, result, parameters, int(group.z), int(group.y), int(group.x * SIMDGROUPS + simdgroup),
      lane);
}

// One threadgroup for each block of queries, head and batch entry.
kernel void d_query(
    OPERAND_AND_RESIDUAL_ARGUMENTS
    device ResultScalar* d_query [[buffer(23)]],
#if WANT_BIAS_PAIRS
    device DBiasScalar* d_bias [[buffer(D_BIAS_BUFFER)]],
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
    THREAD_ARGUMENTS) {
  threadgroup Scalar4 block_qk[tile_size(D_QUERY_ROWS, HEAD_DIM)];
  threadgroup Scalar4 block_vdo[tile_size(D_QUERY_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_QUERY_STREAMS, D_QUERY_COLUMNS)];
  threadgroup float s[D_QUERY_ROWS * score_stride(D_QUERY_COLUMNS)];
  threadgroup float dp[D_QUERY_ROWS * score_stride(D_QUERY_COLUMNS)];
  threadgroup RowMetadata block_metadata[D_QUERY_ROWS];
  threadgroup RowMetadata tile_metadata[D_QUERY_COLUMNS];
  threadgroup Scalar4 ds[tile_size(D_QUERY_ROWS, D_QUERY_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  BackwardMemory memory = {
      (threadgroup Scalar*)block_qk, (threadgroup Scalar*)block_vdo, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_QUERY_STREAMS, D_QUERY_COLUMNS)), s, dp, block_metadata,
      tile_metadata};
  Operands operands = OPERANDS;
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
      memory, (threadgroup Scalar*)ds, scratch + simdgroup * 64, head,
      residuals_of(d_out, lse, delta, head, parameters, batch, head_index), parameters, gradients,
      int(group.x) * D_QUERY_ROWS, worker_at<D_QUERY_ROWS>(thread_index, lane, simdgroup));
}

// One threadgroup for each block of keys, key head and batch entry.
kernel void d_key_value(
    OPERAND_AND_RESIDUAL_ARGUMENTS
    device ResultScalar* d_key [[buffer(23)]],
    device ResultScalar* d_value [[buffer(24)]],
#if WANT_BIAS_COLUMNS
    device float* d_bias_columns [[buffer(25)]],
#endif
    constant Parameters& parameters [[buffer(D_KEY_VALUE_PARAMETERS_BUFFER)]],
    THREAD_ARGUMENTS) {
  threadgroup Scalar4 block_qk[tile_size(D_KEY_VALUE_ROWS, HEAD_DIM)];
  threadgroup Scalar4 block_vdo[tile_size(D_KEY_VALUE_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_KEY_VALUE_STREAMS, D_KEY_VALUE_COLUMNS)];
  threadgroup float s[D_KEY_VALUE_ROWS * score_stride(D_KEY_VALUE_COLUMNS)];
  threadgroup float dp[D_KEY_VALUE_ROWS * score_stride(D_KEY_VALUE_COLUMNS)];
  threadgroup RowMetadata block_metadata[D_KEY_VALUE_ROWS];
  threadgroup RowMetadata tile_metadata[D_KEY_VALUE_COLUMNS];
  threadgroup Scalar4 p[tile_size(D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS)];
  threadgroup Scalar4 ds[tile_size(D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  BackwardMemory memory = {
      (threadgroup Scalar*)block_qk, (threadgroup Scalar*)block_vdo, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_KEY_VALUE_STREAMS, D_KEY_VALUE_COLUMNS)), s, dp, block_metadata,
      tile_metadata};
  Operands operands = OPERANDS;
  int batch = int(group.z), key_head = int(group.y);
  KeyGradients gradients = {};
  gradients.d_key = d_key + batch * parameters.key.batch + long(key_head) * parameters.key.head;
  gradients.d_value = d_value + batch * parameters.value.batch + long(key_head) * parameters.value.head;
#if WANT_BIAS_COLUMNS
  gradients.d_bias_columns = d_bias_columns;
#endif
  d_key_value_block(
      memory, (threadgroup Scalar*)p, (threadgroup Scalar*)ds, scratch + simdgroup * 64, operands, d_out, lse,
      delta, parameters, gradients, batch, key_head, int(group.x) * D_KEY_VALUE_ROWS,
      worker_at<D_KEY_VALUE_ROWS>(thread_index, lane, simdgroup));
}

#if WANT_BIAS_SHARED
// One threadgroup for each block of keys, block of queries and [T, S] of the bias.
kernel void d_bias(
    OPERAND_AND_RESIDUAL_ARGUMENTS
    device DBiasScalar* d_bias [[buffer(23)]],
    constant Parameters& parameters [[buffer(24)]],
    THREAD_ARGUMENTS) {
  threadgroup Scalar4 block_qk[tile_size(D_QUERY_ROWS, HEAD_DIM)];
  threadgroup Scalar4 block_vdo[tile_size(D_QUERY_ROWS, VALUE_DIM)];
  threadgroup Scalar4 stream[stream_size(D_QUERY_STREAMS, D_QUERY_COLUMNS)];
  threadgroup float s[D_QUERY_ROWS * score_stride(D_QUERY_COLUMNS)];
  threadgroup float dp[D_QUERY_ROWS * score_stride(D_QUERY_COLUMNS)];
  threadgroup RowMetadata block_metadata[D_QUERY_ROWS];
  threadgroup RowMetadata tile_metadata[D_QUERY_COLUMNS];
  BackwardMemory memory = {
      (threadgroup Scalar*)block_qk, (threadgroup Scalar*)block_vdo, (threadgroup Scalar*)stream,
      (threadgroup Scalar*)(stream + second_stream(D_QUERY_STREAMS, D_QUERY_COLUMNS)), s, dp, block_metadata,
      tile_metadata};
  Operands operands = OPERANDS;
  int bias_batch = int(group.z) / parameters.bias_heads, bias_head = int(group.z) % parameters.bias_heads;
  d_bias_block(
      memory, operands, d_out, lse, delta, parameters, d_bias + long(group.z) * parameters.queries * parameters.keys,
      bias_batch, bias_head, int(group.y) * D_QUERY_ROWS, int(group.x) * D_QUERY_COLUMNS,
      worker_at<D_QUERY_ROWS>(thread_index, lane, simdgroup));
}
#endif
