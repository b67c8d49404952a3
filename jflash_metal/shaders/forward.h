// Forward: output and log-sum-exp of a block of queries of one head.
//
//   m, l, O = -inf, 0, 0                            for each row
//   for each tile of keys that the block can see:
//     S = logits of Q K^T, -inf where not seen
//     if a row's largest S is well above m:
//       l, O *= exp(m - largest);  m = largest
//     P = exp(S - m)
//     l += sum of P;  O += P V
//   out = O / l;  lse = m + log l                   with a sink, as if it was one more key without a value
//
// Online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691. Any m gives the same result as long as exp stays
// in range, so m follows a row's largest logit only when it must: moving O costs as much as many tiles' products.
#pragma once

#include "scores.h"

/// How far logits may rise above m: exp(5.5) = 245 still fits into half, and 1e38 / 245 keys into float.
constexpr constant float RISE = 5.5f;

struct ForwardMemory {
  threadgroup Scalar* queries;
  /// Keys, and after their product is done values.
  threadgroup Scalar* stream;
  threadgroup float* products;
  threadgroup Scalar* weights;
  threadgroup float* scratch;
  threadgroup float* factors;
  threadgroup Facts* query_facts;
  threadgroup Facts* key_facts;
};

/// One row's sums, each in the threads that have the row.
struct Softmax {
  float reference;
  /// Of this thread's elements of the row.
  float total;
};

/// Turns a tile's products into weights, and leaves in `factors` by how much what was summed before shrinks.
inline void weigh_tile(
    thread Softmax& row,
    thread const ForwardMemory& memory,
    thread const Head& head,
    constant Parameters& parameters,
    int first_query,
    int first_key,
    bool all_seen,
    uint thread_index) {
  typedef Deal<FORWARD_ROWS, FORWARD_COLUMNS> Mine;
  Mine mine(thread_index);
  int query = first_query + mine.row;
  float logits[Mine::COUNT];
  float largest = -INFINITY;
  for (int element = 0; element < Mine::COUNT; ++element) {
    int column = mine.column(element), key = first_key + column;
    logits[element] = -INFINITY;
    if (column < FORWARD_COLUMNS) {
      threadgroup const Facts& query_facts = memory.query_facts[mine.row];
      threadgroup const Facts& key_facts = memory.key_facts[column];
      if (all_seen || seen(head, parameters, query, key, query_facts, key_facts)) {
        float product = memory.products[mine.row * product_stride(FORWARD_COLUMNS) + column];
        logits[element] = logit_of(product, head, parameters, query, key, query_facts, key_facts).value;
      }
      largest = fmax(largest, logits[element]);
    }
  }
  largest = largest_of_row<Mine::LANES>(largest);
  float factor = 1.0f;
  if (largest > row.reference + RISE) {
    // Before the first key there is nothing to shrink.
    factor = row.reference == -INFINITY ? 1.0f : exp_of(row.reference, largest);
    row.reference = largest;
  }
  float reference = row.reference == -INFINITY ? 0.0f : row.reference;
  row.total *= factor;
  for (int element = 0; element < Mine::COUNT; ++element) {
    if (mine.column(element) < FORWARD_COLUMNS) {
      float weight = exp_of(logits[element], reference);
      row.total += weight;
      memory.weights[mine.row * row_stride(FORWARD_COLUMNS) + mine.column(element)] = Scalar(weight);
    }
  }
  if (mine.first_column == 0) {
    memory.factors[mine.row] = factor;
  }
}

/// Writes the log-sum-exp, and leaves in `factors` what the rows' sums are to be multiplied by.
inline void finish_rows(
    thread const Softmax& row,
    thread const ForwardMemory& memory,
    constant Parameters& parameters,
    int first_query,
    float sink,
    device float* lse,
    uint thread_index) {
  typedef Deal<FORWARD_ROWS, FORWARD_COLUMNS> Mine;
  Mine mine(thread_index);
  float total = sum_of_row<Mine::LANES>(row.total);
  float reference = row.reference == -INFINITY ? 0.0f : row.reference;
  bool is_empty = total == 0.0f;
  float factor = 1.0f;
  if (HAS_SINKS) {
    float largest = fmax(reference, sink);
    factor = exp_of(reference, largest);
    total = total * factor + exp_of(sink, largest);
    reference = largest;
  }
  if (mine.first_column == 0) {
    memory.factors[mine.row] = is_empty ? 0.0f : factor / total;
    if (first_query + mine.row < parameters.queries) {
      lse[first_query + mine.row] = is_empty ? -INFINITY : reference + log(total);
    }
  }
}

/// `out` and `lse` are this head's. `sink` counts where the call has sinks.
inline void forward_block(
    thread const ForwardMemory& memory,
    thread const Head& head,
    constant Parameters& parameters,
    int first_query,
    float sink,
    device Scalar* out,
    device float* lse,
    Worker worker) {
  constexpr int ROWS = FORWARD_ROWS, COLUMNS = FORWARD_COLUMNS;
  threadgroup float* scratch = memory.scratch + worker.index / 32 * 64;
  stage<ROWS, HEAD_DIM>(
      memory.queries, head.query + first_query * long(parameters.query.row), parameters.query.row,
      head.query_limit - first_query, worker.index);
  stage_query_facts<ROWS>(memory.query_facts, head, parameters, first_query, worker.index);
  Range range = {0, 0};
  if (HAS_SEGMENTS) {
    range = range_of<ROWS>(head.query_ranges, first_query, parameters.queries, worker.lane);
  }

  Sums<ROWS, VALUE_DIM> sums;
  sums.clear();
  Softmax row = {-INFINITY, 0.0f};
  Span span = keys_of(head, parameters, first_query, ROWS);
  for (int first_key = span.start; first_key < span.stop; first_key += COLUMNS) {
    Sight sight = sight_of<COLUMNS>(span, first_key, range, head.key_ranges, parameters.keys, worker.lane);
    if (sight == Sight::NONE) {
      continue;
    }
    int valid = head.key_limit - first_key;
    stage<COLUMNS, HEAD_DIM>(
        memory.stream, head.key + first_key * long(parameters.key.row), parameters.key.row, valid, worker.index);
    stage_key_facts<COLUMNS>(memory.key_facts, head, parameters, first_key, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<COLUMNS, HEAD_DIM, share_of(ROWS)>(memory.products, memory.queries, memory.stream, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<COLUMNS, VALUE_DIM>(
        memory.stream, head.value + first_key * long(parameters.value.row), parameters.value.row, valid, worker.index);
    weigh_tile(row, memory, head, parameters, first_query, first_key, sight == Sight::ALL, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_any(memory.factors[worker.first_row + worker.lane % 8] != 1.0f)) {
      multiply_rows(sums, memory.factors, scratch, worker);
    }
    multiply_add<COLUMNS>(sums, memory.weights, memory.stream, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  finish_rows(row, memory, parameters, first_query, sink, lse, worker.index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  multiply_rows(sums, memory.factors, scratch, worker);
  write_rows(
      out + first_query * long(parameters.out.row), parameters.out.row, parameters.queries - first_query, sums, scratch,
      worker);
}
