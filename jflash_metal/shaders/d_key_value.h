// Backward of a block of keys of one key head: dK, dV and the other sums over queries.
//
//   dK, dV = 0
//   for each query head that has this key head:
//     for each tile of queries that can see the block:
//       S^T = logits of K Q^T;  dP^T = V dO^T
//       dS^T as in backward.h
//       dV += P^T dO;  dK += dS^T Q
//     the gradient of a bias [.., 1, S] is the sum of dS over queries
#pragma once

#include "backward.h"

/// Gradients of one key head.
struct KeyGradients {
  device ResultScalar* d_key;
  device ResultScalar* d_value;
  /// [B, N, S], to be summed where the bias shares heads or batch entries.
  device float* d_bias_columns;
};

/// Turns a tile's S^T and dP^T into P^T and dS^T. Returns the sum of this thread's dS, all of one key.
inline float differentiate_transposed_tile(
    thread const BackwardMemory& memory,
    threadgroup Scalar* p,
    threadgroup Scalar* ds,
    thread const Head& head,
    constant Parameters& parameters,
    thread const Visit& tile,
    int first_key,
    uint thread_index) {
  typedef LaneMap<D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS> Lanes;
  Lanes lanes(thread_index);
  float sum = 0.0f;
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    int column = lanes.column(element);
    if (column < D_KEY_VALUE_COLUMNS) {
      int index = lanes.row * score_stride(D_KEY_VALUE_COLUMNS) + column;
      ScoreGradient gradient = score_gradient(
          memory.s[index], memory.dp[index], head, parameters, tile.first + column, first_key + lanes.row,
          memory.tile_metadata[column], memory.block_metadata[lanes.row], tile);
      int to = lanes.row * row_stride(D_KEY_VALUE_COLUMNS) + column;
      p[to] = Scalar(gradient.p);
      ds[to] = Scalar(gradient.d_scaled * head.scale);
      sum += gradient.d_logit;
    }
  }
  return sum;
}

/// `d_out`, `lse` and `delta` belong to the whole call.
inline void d_key_value_block(
    thread const BackwardMemory& memory,
    threadgroup Scalar* p,
    threadgroup Scalar* ds,
    threadgroup float* scratch,
    thread const Operands& operands,
    device const Scalar* d_out,
    device const float* lse,
    device const float* delta,
    constant Parameters& parameters,
    thread const KeyGradients& gradients,
    int batch,
    int key_head,
    int first_key,
    Worker worker) {
  constexpr int ROWS = D_KEY_VALUE_ROWS, COLUMNS = D_KEY_VALUE_COLUMNS, SHARE = share_of(ROWS);
  typedef LaneMap<ROWS, COLUMNS> Lanes;
  Lanes lanes(worker.index);
  int first_head = key_head * parameters.group;
  Head shared = head_of(operands, parameters, batch, first_head);
  int valid_rows = shared.key_limit - first_key;
  load_tile<ROWS, HEAD_DIM>(memory.block_qk, key_rows(shared, parameters, first_key), valid_rows, worker.index);
  load_tile<ROWS, VALUE_DIM>(memory.block_vdo, value_rows(shared, parameters, first_key), valid_rows, worker.index);

  Accumulator<ROWS, HEAD_DIM> acc_dk;
  Accumulator<ROWS, VALUE_DIM> acc_dv;
  acc_dk.clear();
  acc_dv.clear();
  for (int head_index = first_head; head_index < first_head + parameters.group; ++head_index) {
    Head head = head_of(operands, parameters, batch, head_index);
    Residuals residuals = residuals_of(d_out, lse, delta, head, parameters, batch, head_index);
    load_key_metadata<ROWS>(memory.block_metadata, head, parameters, first_key, worker.index);
    float bias_sum = 0.0f;
    Walk<ROWS, COLUMNS, false> walk = walk_queries<ROWS, COLUMNS>(head, parameters, first_key, worker.lane);
    Visit tile;
    while (walk.next(tile, worker.lane)) {
      int valid = head.query_limit - tile.first;
      Rows queries = query_rows(head, parameters, tile.first);
      SeeingRows d_outs = d_out_rows(residuals, parameters, tile.first);
      load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, queries, valid, worker.index);
      if (D_KEY_VALUE_STREAMS == 2) {
        load_tile<COLUMNS, VALUE_DIM>(memory.tile_vdo, d_outs, valid, worker.index);
      }
      load_query_metadata<COLUMNS>(memory.tile_metadata, head, parameters, tile.first, worker.index);
      load_row_statistics<COLUMNS>(memory.tile_metadata, residuals, tile.first, parameters.queries, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_transposed<COLUMNS, HEAD_DIM, SHARE>(memory.s, memory.block_qk, memory.tile_qk, worker);
      if (D_KEY_VALUE_STREAMS == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<COLUMNS, VALUE_DIM>(memory.tile_vdo, d_outs, valid, worker.index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      multiply_transposed<COLUMNS, VALUE_DIM, SHARE>(memory.dp, memory.block_vdo, memory.tile_vdo, worker);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      bias_sum += differentiate_transposed_tile(
          memory, p, ds, head, parameters, tile, first_key, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_add<COLUMNS>(acc_dv, p, memory.tile_vdo, worker);
      if (D_KEY_VALUE_STREAMS == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, queries, valid, worker.index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      multiply_add<COLUMNS>(acc_dk, ds, memory.tile_qk, worker);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (WANT_BIAS_COLUMNS) {
      float sum = reduce_sum<Lanes::PER_ROW>(bias_sum);
      if (lanes.first_column == 0 && first_key + lanes.row < parameters.keys) {
        long row = long(batch) * parameters.heads + head_index;
        gradients.d_bias_columns[row * parameters.keys + first_key + lanes.row] = sum;
      }
    }
  }
  int rows = parameters.keys - first_key;
  write_rows(
      gradients.d_key + first_key * long(parameters.key.row), parameters.key.row, rows, acc_dk, scratch, worker);
  write_rows(
      gradients.d_value + first_key * long(parameters.value.row), parameters.value.row, rows, acc_dv, scratch, worker);
}
