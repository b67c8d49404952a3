// Backward of a block of queries of one head: dQ, and what else is a sum over keys.
//
//   dQ = 0
//   for each tile of keys that the block can see:
//     S = logits of Q K^T;  dP = dO V^T
//     dS as in backward.h
//     dQ += dS K
//     the bias's gradient, where it has the shape [B, N, T, S], is dS
//     rows' sums: of a bias [.., T, 1], of ALiBi's slope, of the scale
#pragma once

#include "backward.h"

/// Results of one head beside dQ; those that nobody asked for are not touched.
struct QueryGradients {
  device Scalar* d_query;
  /// [T, S].
  device BiasScalar* d_bias;
  /// [T] each, to be summed.
  device float* d_bias_rows;
  device float* d_slope_rows;
  device float* d_scale_rows;
};

/// This thread's part of a row's sums.
struct RowSums {
  float bias;
  float slope;
  float scale;
};

/// The keys of a block that no tile shows have no gradient.
inline void clear_bias(device BiasScalar* d_bias, int rows, int first_key, int stop_key, int keys, uint thread_index) {
  int count = stop_key - first_key;
  for (int index = int(thread_index); index < rows * count; index += THREADS) {
    d_bias[long(index / count) * keys + first_key + index % count] = BiasScalar(0.0f);
  }
}

/// Turns a tile's products into dS, and adds up what its rows give.
inline void differentiate_tile(
    thread RowSums& sums,
    thread const BackwardMemory& memory,
    threadgroup Scalar* d_scores,
    thread const Head& head,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    int first_key,
    bool all_seen,
    uint thread_index) {
  typedef Deal<D_QUERY_ROWS, D_QUERY_COLUMNS> Mine;
  Mine mine(thread_index);
  int query = first_query + mine.row;
  for (int element = 0; element < Mine::COUNT; ++element) {
    int column = mine.column(element), key = first_key + column;
    if (column < D_QUERY_COLUMNS) {
      int index = mine.row * product_stride(D_QUERY_COLUMNS) + column;
      float product = memory.products[index];
      Pair pair = pair_of(
          product, memory.d_weights[index], head, parameters, query, key, memory.own_facts[mine.row],
          memory.stream_facts[column], all_seen);
      d_scores[mine.row * row_stride(D_QUERY_COLUMNS) + column] = Scalar(pair.d_scaled * head.scale);
      if (WANT_BIAS_PAIRS && query < parameters.queries && key < parameters.keys) {
        gradients.d_bias[long(query) * parameters.keys + key] = BiasScalar(pair.d_logit);
      }
      sums.bias += pair.d_logit;
      if (HAS_ALIBI) {
        sums.slope -= pair.d_logit * float(abs(key - (query + head.offset)));
      }
      sums.scale += pair.d_scaled == 0.0f ? 0.0f : pair.d_scaled * product;
    }
  }
}

inline void write_row_sums(
    thread const RowSums& sums,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    uint thread_index) {
  typedef Deal<D_QUERY_ROWS, D_QUERY_COLUMNS> Mine;
  Mine mine(thread_index);
  int query = first_query + mine.row;
  bool is_writer = mine.first_column == 0 && query < parameters.queries;
  if (WANT_BIAS_ROWS) {
    float sum = sum_of_row<Mine::LANES>(sums.bias);
    if (is_writer) {
      gradients.d_bias_rows[query] = sum;
    }
  }
  if (WANT_SLOPES) {
    float sum = sum_of_row<Mine::LANES>(sums.slope);
    if (is_writer) {
      gradients.d_slope_rows[query] = sum;
    }
  }
  if (WANT_SCALE) {
    float sum = sum_of_row<Mine::LANES>(sums.scale);
    if (is_writer) {
      gradients.d_scale_rows[query] = sum;
    }
  }
}

inline void d_query_block(
    thread const BackwardMemory& memory,
    threadgroup Scalar* d_scores,
    threadgroup float* scratch,
    thread const Head& head,
    thread const Residuals& residuals,
    constant Parameters& parameters,
    thread const QueryGradients& gradients,
    int first_query,
    Worker worker) {
  constexpr int ROWS = D_QUERY_ROWS, COLUMNS = D_QUERY_COLUMNS, SHARE = share_of(ROWS);
  int valid_rows = head.query_limit - first_query;
  stage<ROWS, HEAD_DIM>(
      memory.own_heads, head.query + first_query * long(parameters.query.row), parameters.query.row, valid_rows,
      worker.index);
  stage<ROWS, VALUE_DIM>(
      memory.own_values, residuals.d_out + first_query * long(parameters.out.row), parameters.out.row, valid_rows,
      worker.index);
  stage_query_facts<ROWS>(memory.own_facts, head, parameters, first_query, worker.index);
  stage_residuals<ROWS>(memory.own_facts, residuals, first_query, parameters.queries, worker.index);
  Range range = {0, 0};
  if (HAS_SEGMENTS) {
    range = range_of<ROWS>(head.query_ranges, first_query, parameters.queries, worker.lane);
  }

  Sums<ROWS, HEAD_DIM> sums;
  sums.clear();
  RowSums row_sums = {0.0f, 0.0f, 0.0f};
  int rows = min(ROWS, parameters.queries - first_query);
  device BiasScalar* d_bias = gradients.d_bias + long(first_query) * (WANT_BIAS_PAIRS ? parameters.keys : 0);
  Span span = keys_of(head, parameters, first_query, ROWS);
  int first_key = span.start;
  if (WANT_BIAS_PAIRS) {
    clear_bias(d_bias, rows, 0, first_key, parameters.keys, worker.index);
  }
  for (; first_key < span.stop; first_key += COLUMNS) {
    Sight sight = sight_of<COLUMNS>(span, first_key, range, head.key_ranges, parameters.keys, worker.lane);
    if (sight == Sight::NONE) {
      if (WANT_BIAS_PAIRS) {
        clear_bias(
            d_bias, rows, first_key, min(first_key + COLUMNS, parameters.keys), parameters.keys, worker.index);
      }
      continue;
    }
    int valid = head.key_limit - first_key;
    device const Scalar* keys = head.key + first_key * long(parameters.key.row);
    device const Scalar* values = head.value + first_key * long(parameters.value.row);
    stage<COLUMNS, VALUE_DIM>(memory.stream_values, values, parameters.value.row, valid, worker.index);
    if (D_QUERY_STREAMS == 2) {
      stage<COLUMNS, HEAD_DIM>(memory.stream_heads, keys, parameters.key.row, valid, worker.index);
    }
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
    differentiate_tile(
        row_sums, memory, d_scores, head, parameters, gradients, first_query, first_key, sight == Sight::ALL,
        worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_add<COLUMNS>(sums, d_scores, memory.stream_heads, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (WANT_BIAS_PAIRS) {
    clear_bias(d_bias, rows, min(first_key, parameters.keys), parameters.keys, parameters.keys, worker.index);
  }
  write_row_sums(row_sums, parameters, gradients, first_query, worker.index);
  write_rows(
      gradients.d_query + first_query * long(parameters.query.row), parameters.query.row,
      parameters.queries - first_query, sums, scratch, worker);
}
