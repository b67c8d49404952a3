// The entry point of the forward: one threadgroup for each block of queries, head and batch entry.
#include "forward.h"

kernel void forward(
    OPERAND_ARGUMENTS
    device const float* sinks [[buffer(20)]],
    device ResultScalar* out [[buffer(21)]],
    device float* lse [[buffer(22)]],
    constant Parameters& parameters [[buffer(23)]],
    THREAD_ARGUMENTS) {
  threadgroup Scalar4 q[tile_size(FORWARD_ROWS, HEAD_DIM)];
  threadgroup Scalar4 kv[tile_size(FORWARD_COLUMNS, HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM)];
  threadgroup float s[FORWARD_ROWS * score_stride(FORWARD_COLUMNS)];
  threadgroup Scalar4 p[tile_size(FORWARD_ROWS, FORWARD_COLUMNS)];
  threadgroup float scratch[SIMDGROUPS * 64];
  threadgroup float rescale[FORWARD_ROWS];
  threadgroup RowMetadata query_metadata[FORWARD_ROWS];
  threadgroup RowMetadata key_metadata[FORWARD_COLUMNS];
  ForwardMemory memory = {
      (threadgroup Scalar*)q, (threadgroup Scalar*)kv, s, (threadgroup Scalar*)p, scratch, rescale,
      query_metadata, key_metadata};
  Operands operands = OPERANDS;
  int batch = int(group.z), head_index = int(group.y);
  Head head = head_of(operands, parameters, batch, head_index);
  float sink = HAS_SINKS ? sinks[batch * parameters.sinks_stride + head_index] : 0.0f;
  forward_block(
      memory, head, parameters, int(group.x) * FORWARD_ROWS, sink,
      out + batch * parameters.out.batch + long(head_index) * parameters.out.head, lse + head.rows,
      worker_at<FORWARD_ROWS>(thread_index, lane, simdgroup));
}
