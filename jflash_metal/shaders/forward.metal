// The entry point of the forward: one threadgroup for each block of queries, head and batch entry.
#include "forward.h"

kernel void forward(
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
    device const float* sinks [[buffer(14)]],
    device Scalar* out [[buffer(15)]],
    device float* lse [[buffer(16)]],
    constant Parameters& parameters [[buffer(17)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Scalar4 queries[tile_size(FORWARD_ROWS, HEAD_DIM)];
  threadgroup Scalar4 stream[tile_size(FORWARD_COLUMNS, HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM)];
  threadgroup float products[FORWARD_ROWS * product_stride(FORWARD_COLUMNS)];
  threadgroup Scalar4 weights[tile_size(FORWARD_ROWS, FORWARD_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  threadgroup float factors[FORWARD_ROWS];
  threadgroup Facts query_facts[FORWARD_ROWS];
  threadgroup Facts key_facts[FORWARD_COLUMNS];
  ForwardMemory memory = {
      (threadgroup Scalar*)queries, (threadgroup Scalar*)stream, products, (threadgroup Scalar*)weights, scratch, factors,
      query_facts, key_facts};
  Operands operands = {
      query, key, value, bias, mask, scale, alibi_slopes, query_offset, query_lengths, key_lengths, query_segments,
      key_segments, query_ranges, key_ranges};
  int batch = int(group.z), head_index = int(group.y);
  Head head = head_of(operands, parameters, batch, head_index);
  float sink = HAS_SINKS ? sinks[batch * parameters.sinks_stride + head_index] : 0.0f;
  forward_block(
      memory, head, parameters, int(group.x) * FORWARD_ROWS, sink,
      out + batch * parameters.out.batch + long(head_index) * parameters.out.head, lse + head.rows,
      worker_at<FORWARD_ROWS>(thread_index, lane, simdgroup));
}
