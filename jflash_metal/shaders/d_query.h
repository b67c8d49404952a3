// Backward of a block of queries of one head: dQ and the other sums over keys.
//
//   dQ = 0
//   for each tile of keys that the block can see:
//     S = logits of Q K^T;  dP = dO V^T
//     dS as in backward.h
//     dQ += dS K
//     the gradient of a bias [B, N, T, S] is dS
//     the gradients of a bias [.., T, 1], of the ALiBi slope and of the scale are sums over rows
#pragma once

#include "backward.h"

/// Gradients of one head; those that are not wanted stay null.
struct QueryGradients {
  device ResultScalar* d_query;
  /// [T, S].
  device DBiasScalar* d_bias;
  /// [T] each, one sum for each row.
  device float* d_bias_rows;
  device float* d_slope_rows;
  device float* d_scale_rows;
};

/// This thread's share of the sums over one row.
struct RowSums {
  float bias;
  float slope;
  float scale;
};

/// Zeros for keys that the block does not see.
inline void clear_bias(device DBiasScalar* d_bias, int rows, int first_key, int stop_key, int keys, uint thread_index) {
  int count = stop_key - first_key;
  for (int index = int(thread_index); index < rows * count; index += THREADS) {
    d_bias[long(index / count) * keys + first_key + index % count] = DBiasScalar(0.0f);
  }
}

/// Turns a tile's S and dP into dS, and adds to the sums over rows.
inline void differentiate_tile(
    thread RowSums& sums,
    thread const BackwardMemory& memory,
    threadgroup Scalar* ds,
    thread const Head& head,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    thread const Visit& tile,
    uint thread_index) {
  typedef LaneMap<D_QUERY_ROWS, D_QUERY_COLUMNS> Lanes;
  Lanes lanes(thread_index);
  int query = first_query + lanes.row;
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    int column = lanes.column(element), key = tile.first + column;
    if (column < D_QUERY_COLUMNS) {
      int index = lanes.row * score_stride(D_QUERY_COLUMNS) + column;
      float product = memory.s[index];
      ScoreGradient gradient = score_gradient(
          product, memory.dp[index], head, parameters, query, key, memory.block_metadata[lanes.row],
          memory.tile_metadata[column], tile);
      ds[lanes.row * row_stride(D_QUERY_COLUMNS) + column] = Scalar(gradient.d_scaled * head.scale);
      if (WANT_BIAS_PAIRS && query < parameters.queries && key < parameters.keys) {
        gradients.d_bias[long(query) * parameters.keys + key] = DBiasScalar(gradient.d_logit);
      }
      sums.bias += gradient.d_logit;
      if (HAS_ALIBI) {
        sums.slope -= gradient.d_logit * float(abs(key - (query + head.offset)));
      }
      sums.scale += gradient.d_scaled == 0.0f ? 0.0f : gradient.d_scaled * product;
    }
  }
}

inline void write_row_sums(
    thread const RowSums& sums,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    uint thread_index) {
  typedef LaneMap<D_QUERY_ROWS, D_QUERY_COLUMNS> Lanes;
  Lanes lanes(thread_index);
  int query = first_query + lanes.row;
  bool is_writer = lanes.first_column == 0 && query < parameters.queries;
  if (WANT_BIAS_ROWS) {
    float sum = reduce_sum<Lanes::PER_ROW>(sums.bias);
    if (is_writer) {
      gradients.d_bias_rows[query] = sum;
    }
  }
  if (WANT_SLOPES) {
    float sum = reduce_sum<Lanes::PER_ROW>(sums.slope);
    if (is_writer) {
      gradients.d_slope_rows[query] = sum;
    }
  }
  if (WANT_SCALE) {
    float sum = reduce_sum<Lanes::PER_ROW>(sums.scale);
    if (is_writer) {
      gradients.d_scale_rows[query] = sum;
    }
  }
}

inline void d_query_block(
    thread const BackwardMemory& memory,
    threadgroup Scalar* ds,
    threadgroup float* scratch,
    thread const Head& head,
    thread const Residuals& residuals,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    Worker worker) {
  constexpr int ROWS = D_QUERY_ROWS, COLUMNS = D_QUERY_COLUMNS, SHARE = share_of(ROWS);
  int valid_rows = head.query_limit - first_query;
  load_tile<ROWS, HEAD_DIM>(memory.block_qk, query_rows(head, parameters, first_query), valid_rows, worker.index);
  load_tile<ROWS, VALUE_DIM>(memory.block_vdo, d_out_rows(residuals, parameters, first_query), valid_rows, worker.index);
  load_query_metadata<ROWS>(memory.block_metadata, head, parameters, first_query, worker.index);
  load_row_statistics<ROWS>(memory.block_metadata, residuals, first_query, parameters.queries, worker.index);

  Accumulator<ROWS, HEAD_DIM> acc_dq;
  acc_dq.clear();
  RowSums row_sums = {0.0f, 0.0f, 0.0f};
  int rows = min(ROWS, parameters.queries - first_query);
  device DBiasScalar* d_bias = gradients.d_bias + long(first_query) * (WANT_BIAS_PAIRS ? parameters.keys : 0);
  int cleared = 0;
  Walk<ROWS, COLUMNS, true> walk = walk_keys<ROWS, COLUMNS>(head, parameters, first_query, worker.lane);
  Visit tile;
  while (walk.next(tile, worker.lane)) {
    if (WANT_BIAS_PAIRS) {
      clear_bias(d_bias, rows, cleared, tile.first, parameters.keys, worker.index);
      cleared = tile.first + COLUMNS;
    }
    int valid = head.key_limit - tile.first;
    load_tile<COLUMNS, VALUE_DIM>(memory.tile_vdo, value_rows(head, parameters, tile.first), valid, worker.index);
    if (D_QUERY_STREAMS == 2) {
      load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, key_rows(head, parameters, tile.first), valid, worker.index);
    }
    load_key_metadata<COLUMNS>(memory.tile_metadata, head, parameters, tile.first, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<COLUMNS, VALUE_DIM, SHARE>(memory.dp, memory.block_vdo, memory.tile_vdo, worker);
    if (D_QUERY_STREAMS == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_tile<COLUMNS, HEAD_DIM>(memory.tile_qk, key_rows(head, parameters, tile.first), valid, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    multiply_transposed<COLUMNS, HEAD_DIM, SHARE>(memory.s, memory.block_qk, memory.tile_qk, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    differentiate_tile(row_sums, memory, ds, head, parameters, gradients, first_query, tile, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_add<COLUMNS>(acc_dq, ds, memory.tile_qk, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (WANT_BIAS_PAIRS) {
    clear_bias(d_bias, rows, min(cleared, parameters.keys), parameters.keys, parameters.keys, worker.index);
  }
  write_row_sums(row_sums, parameters, gradients, first_query, worker.index);
  write_rows(
      gradients.d_query + first_query * long(parameters.query.row), parameters.query.row,
      parameters.queries - first_query, acc_dq, scratch, worker);
}
