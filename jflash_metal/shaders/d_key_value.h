// Backward of a block of keys of one key head: dK and dV, and what else is a sum over queries.
//
//   dK, dV = 0
//   for each query head that has this key head:
//     for each tile of queries that can see the block:
//       S^T = logits of K Q^T;  dP^T = V dO^T
//       dS^T as in backward.h
//       dV += P^T dO;  dK += dS^T Q
//     sums over queries: of a bias [.., 1, S]
#pragma once

#include "backward.h"

/// Results of one key head.
struct KeyGradients {
  device Scalar* d_key;
  device Scalar* d_value;
  /// [B, N, S], to be summed where the bias shares heads or batch entries.
  device float* d_bias_columns;
};

/// Turns a tile's products into P^T and dS^T; the sum of this thread's gradients of its key's logits.
inline float differentiate_transposed_tile(
    thread const BackwardMemory& memory,
    threadgroup Scalar* weights,
    threadgroup Scalar* d_scores,
    thread const Head& head,
    constant Parameters& parameters,
    int first_query,
    int first_key,
    bool all_seen,
    uint thread_index) {
  typedef Deal<D_KEY_VALUE_ROWS, D_KEY_VALUE_COLUMNS> Mine;
  Mine mine(thread_index);
  float sum = 0.0f;
  for (int element = 0; element < Mine::COUNT; ++element) {
    int column = mine.column(element);
    if (column < D_KEY_VALUE_COLUMNS) {
      int index = mine.row * product_stride(D_KEY_VALUE_COLUMNS) + column;
      Pair pair = pair_of(
          memory.products[index], memory.d_weights[index], head, parameters, first_query + column, first_key + mine.row,
          memory.stream_facts[column], memory.own_facts[mine.row], all_seen);
      int to = mine.row * row_stride(D_KEY_VALUE_COLUMNS) + column;
      weights[to] = Scalar(pair.weight);
      d_scores[to] = Scalar(pair.d_scaled * head.scale);
      sum += pair.d_logit;
    }
  }
  return sum;
}

/// `d_out`, `lse` and `delta` are the whole call's.
inline void d_key_value_block(
    thread const BackwardMemory& memory,
    threadgroup Scalar* weights,
    threadgroup Scalar* d_scores,
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
  typedef Deal<ROWS, COLUMNS> Mine;
  Mine mine(worker.index);
  int first_head = key_head * parameters.group;
  Head shared = head_of(operands, parameters, batch, first_head);
  int valid_rows = shared.key_limit - first_key;
  stage<ROWS, HEAD_DIM>(
      memory.own_heads, shared.key + first_key * long(parameters.key.row), parameters.key.row, valid_rows,
      worker.index);
  stage<ROWS, VALUE_DIM>(
      memory.own_values, shared.value + first_key * long(parameters.value.row), parameters.value.row, valid_rows,
      worker.index);
  Range range = {0, 0};
  if (HAS_SEGMENTS) {
    range = range_of<ROWS>(shared.key_ranges, first_key, parameters.keys, worker.lane);
  }
  Span span = queries_of(shared, parameters, first_key, ROWS);

  Sums<ROWS, HEAD_DIM> d_keys;
  Sums<ROWS, VALUE_DIM> d_values;
  d_keys.clear();
  d_values.clear();
  for (int head_index = first_head; head_index < first_head + parameters.group; ++head_index) {
    Head head = head_of(operands, parameters, batch, head_index);
    Residuals residuals = residuals_of(d_out, lse, delta, head, parameters, batch, head_index);
    stage_key_facts<ROWS>(memory.own_facts, head, parameters, first_key, worker.index);
    float bias_sum = 0.0f;
    for (int first_query = span.start; first_query < span.stop; first_query += COLUMNS) {
      Sight sight = sight_of<COLUMNS>(span, first_query, range, head.query_ranges, parameters.queries, worker.lane);
      if (sight == Sight::NONE) {
        continue;
      }
      int valid = head.query_limit - first_query;
      device const Scalar* queries = head.query + first_query * long(parameters.query.row);
      device const Scalar* d_outs = residuals.d_out + first_query * long(parameters.out.row);
      stage<COLUMNS, HEAD_DIM>(memory.stream_heads, queries, parameters.query.row, valid, worker.index);
      if (D_KEY_VALUE_STREAMS == 2) {
        stage<COLUMNS, VALUE_DIM>(memory.stream_values, d_outs, parameters.out.row, valid, worker.index);
      }
      stage_query_facts<COLUMNS>(memory.stream_facts, head, parameters, first_query, worker.index);
      stage_residuals<COLUMNS>(memory.stream_facts, residuals, first_query, parameters.queries, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_transposed<COLUMNS, HEAD_DIM, SHARE>(memory.products, memory.own_heads, memory.stream_heads, worker);
      if (D_KEY_VALUE_STREAMS == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<COLUMNS, VALUE_DIM>(memory.stream_values, d_outs, parameters.out.row, valid, worker.index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      multiply_transposed<COLUMNS, VALUE_DIM, SHARE>(memory.d_weights, memory.own_values, memory.stream_values, worker);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      bias_sum += differentiate_transposed_tile(
          memory, weights, d_scores, head, parameters, first_query, first_key, sight == Sight::ALL, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_add<COLUMNS>(d_values, weights, memory.stream_values, worker);
      if (D_KEY_VALUE_STREAMS == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<COLUMNS, HEAD_DIM>(memory.stream_heads, queries, parameters.query.row, valid, worker.index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      multiply_add<COLUMNS>(d_keys, d_scores, memory.stream_heads, worker);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (WANT_BIAS_COLUMNS) {
      float sum = sum_of_row<Mine::LANES>(bias_sum);
      if (mine.first_column == 0 && first_key + mine.row < parameters.keys) {
        gradients.d_bias_columns[(long(batch) * parameters.heads + head_index) * parameters.keys + first_key + mine.row] =
            sum;
      }
    }
  }
  int rows = parameters.keys - first_key;
  write_rows(
      gradients.d_key + first_key * long(parameters.key.row), parameters.key.row, rows, d_keys, scratch, worker);
  write_rows(
      gradients.d_value + first_key * long(parameters.value.row), parameters.value.row, rows, d_values, scratch, worker);
}
