// The gradient of a bias [T, S] that batch entries or heads share: one block of it, summed over them.
//
//   for each batch entry and head that has this bias:
//     S = logits of Q K^T;  dP = dO V^T
//     sum += dS as in backward.h
//
// This recomputes every tile of d_query.h; the alternative is a [T, S] array for every head.
#pragma once

#include "backward.h"

/// `d_out`, `lse` and `delta` belong to the whole call, `d_bias` is [T, S].
inline void d_bias_block(
    thread const BackwardMemory& memory,
    thread const Operands& operands,
    device const Scalar* d_out,
    device const float* lse,
    device const float* delta,
    constant Parameters& parameters,
    device DBiasScalar* d_bias,
    int bias_batch,
    int bias_head,
    int first_query,
    int first_key,
    Worker worker) {
  constexpr int ROWS = D_QUERY_ROWS, COLUMNS = D_QUERY_COLUMNS, SHARE = share_of(ROWS);
  typedef LaneMap<ROWS, COLUMNS> Lanes;
  Lanes lanes(worker.index);
  float sums[Lanes::ELEMENTS];
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    sums[element] = 0.0f;
  }
  int batches = parameters.bias_batch == 1 ? parameters.batch : 1;
  int heads = parameters.bias_heads == 1 ? parameters.heads : 1;
  for (int index = 0; index < batches * heads; ++index) {
    int batch = batches == 1 ? bias_batch : index / heads, head_index = heads == 1 ? bias_head : index % heads;
    Head head = head_of(operands, parameters, batch, head_index);
    Residuals residuals = residuals_of(d_out, lse, delta, head, parameters, batch, head_index);
    Visit tile;
    if (!walk_keys<ROWS, COLUMNS>(head, parameters, first_query, worker.lane).find(tile, first_key, worker.lane)) {
      continue;
    }
    int valid_rows = head.query_limit - first_query, valid = head.key_limit - first_key;
    load_tile<ROWS, HEAD_DIM>(memory.block_qk, query_rows(head, parameters, first_query), valid_rows, worker.index);
    load_tile<ROWS, VALUE_DIM>(
        memory.block_vdo, d_out_rows(residuals, parameters, first_query), valid_rows, worker.index);
    load_tile<COLUMNS, VALUE_DIM>(memory.tile_vdo, value_rows(head, parameters, first_key), valid, worker.index);
    if (D_QUERY_STREAMS == 2) {
      load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, key_rows(head, parameters, first_key), valid, worker.index);
    }
    load_query_metadata<ROWS>(memory.block_metadata, head, parameters, first_query, worker.index);
    load_row_statistics<ROWS>(memory.block_metadata, residuals, first_query, parameters.queries, worker.index);
    load_key_metadata<COLUMNS>(memory.tile_metadata, head, parameters, first_key, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<COLUMNS, VALUE_DIM, SHARE>(memory.dp, memory.block_vdo, memory.tile_vdo, worker);
    if (D_QUERY_STREAMS == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, key_rows(head, parameters, first_key), valid, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    multiply_transposed<COLUMNS, HEAD_DIM, SHARE>(memory.s, memory.block_qk, memory.tile_qk, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int element = 0; element < Lanes::ELEMENTS; ++element) {
      int column = lanes.column(element);
      if (column < COLUMNS) {
        int at = lanes.row * score_stride(COLUMNS) + column;
        sums[element] += score_gradient(
            memory.s[at], memory.dp[at], head, parameters, first_query + lanes.row, first_key + column,
            memory.block_metadata[lanes.row], memory.tile_metadata[column], tile).d_logit;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  int query = first_query + lanes.row;
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    int key = first_key + lanes.column(element);
    if (lanes.column(element) < COLUMNS && query < parameters.queries && key < parameters.keys) {
      d_bias[long(query) * parameters.keys + key] = DBiasScalar(sums[element]);
    }
  }
}
