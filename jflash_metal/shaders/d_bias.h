// The gradient of a bias [T, S] that batch entries or heads share: a block of it, summed over those that share it.
//
//   for each batch entry and head that has this bias:
//     S = logits of Q K^T;  dP = dO V^T
//     sum += dS as in backward.h
//
// Each tile is computed once more than dQ needs it, as the alternative is a [T, S] array for every head.
#pragma once

#include "backward.h"

/// `d_out`, `lse` and `delta` are the whole call's, `d_bias` this part's [T, S].
inline void d_bias_block(
    thread const BackwardMemory& memory,
    thread const Operands& operands,
    device const Scalar* d_out,
    device const float* lse,
    device const float* delta,
    constant Parameters& parameters,
    device BiasScalar* d_bias,
    int bias_batch,
    int bias_head,
    int first_query,
    int first_key,
    Worker worker) {
  constexpr int ROWS = D_QUERY_ROWS, COLUMNS = D_QUERY_COLUMNS, SHARE = share_of(ROWS);
  typedef Deal<ROWS, COLUMNS> Mine;
  Mine mine(worker.index);
  float sums[Mine::COUNT];
  for (int element = 0; element < Mine::COUNT; ++element) {
    sums[element] = 0.0f;
  }
  int batches = parameters.bias_batch == 1 ? parameters.batch : 1;
  int heads = parameters.bias_heads == 1 ? parameters.heads : 1;
  for (int one = 0; one < batches * heads; ++one) {
    int batch = batches == 1 ? bias_batch : one / heads, head_index = heads == 1 ? bias_head : one % heads;
    Head head = head_of(operands, parameters, batch, head_index);
    Residuals residuals = residuals_of(d_out, lse, delta, head, parameters, batch, head_index);
    Span span = keys_of(head, parameters, first_query, ROWS);
    if (first_key >= span.stop || first_key + COLUMNS <= span.start) {
      continue;
    }
    Range range = {0, 0};
    if (HAS_SEGMENTS) {
      range = range_of<ROWS>(head.query_ranges, first_query, parameters.queries, worker.lane);
    }
    Sight sight = sight_of<COLUMNS>(span, first_key, range, head.key_ranges, parameters.keys, worker.lane);
    if (sight == Sight::NONE) {
      continue;
    }
    int valid_rows = head.query_limit - first_query, valid = head.key_limit - first_key;
    device const Scalar* keys = head.key + first_key * long(parameters.key.row);
    stage<ROWS, HEAD_DIM>(
        memory.own_heads, head.query + first_query * long(parameters.query.row), parameters.query.row, valid_rows,
        worker.index);
    stage<ROWS, VALUE_DIM>(
        memory.own_values, residuals.d_out + first_query * long(parameters.out.row), parameters.out.row, valid_rows,
        worker.index);
    stage<COLUMNS, VALUE_DIM>(
        memory.stream_values, head.value + first_key * long(parameters.value.row), parameters.value.row, valid,
        worker.index);
    if (D_QUERY_STREAMS == 2) {
      stage<COLUMNS, HEAD_DIM>(memory.stream_heads, keys, parameters.key.row, valid, worker.index);
    }
    stage_query_facts<ROWS>(memory.own_facts, head, parameters, first_query, worker.index);
    stage_residuals<ROWS>(memory.own_facts, residuals, first_query, parameters.queries, worker.index);
    stage_key_facts<COLUMNS>(memory.stream_facts, head, parameters, first_key, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<COLUMNS, VALUE_DIM, SHARE>(memory.d_weights, memory.own_values, memory.stream_values, worker);
    if (D_QUERY_STREAMS == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage<COLUMNS, HEAD_DIM>(memory.stream_heads, keys, parameters.key.row, valid, worker.index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    multiply_transposed<COLUMNS, HEAD_DIM, SHARE>(memory.products, memory.own_heads, memory.stream_heads, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int element = 0; element < Mine::COUNT; ++element) {
      int column = mine.column(element);
      if (column < COLUMNS) {
        int index = mine.row * product_stride(COLUMNS) + column;
        sums[element] += pair_of(
            memory.products[index], memory.d_weights[index], head, parameters, first_query + mine.row,
            first_key + column, memory.own_facts[mine.row], memory.stream_facts[column], sight == Sight::ALL).d_logit;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  int query = first_query + mine.row;
  for (int element = 0; element < Mine::COUNT; ++element) {
    int key = first_key + mine.column(element);
    if (mine.column(element) < COLUMNS && query < parameters.queries && key < parameters.keys) {
      d_bias[long(query) * parameters.keys + key] = BiasScalar(sums[element]);
    }
  }
}
