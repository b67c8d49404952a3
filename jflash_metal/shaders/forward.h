// Forward: output and log-sum-exp of a block of queries of one head.
//
//   m, l, O = -inf, 0, 0                            for each row
//   for each tile of keys that the block can see:
//     S = logits of Q K^T, -inf where not seen
//     if a row's largest S is well above m:
//       l, O *= exp(m - largest);  m = largest
//     P = exp(S - m)
//     l += sum of P;  O += P V
//   out = O / l;  lse = m + log l                   a sink counts as one more key, without a value
//
// Online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691. Any m gives the same result while exp stays in
// range, so m follows a row's largest logit only when it must: rescaling O costs as much as several tiles.
#pragma once

#include "scores.h"

/// How far logits may rise above m before O is rescaled: exp(5.5) = 245 still fits into half, and 1e38 / 245 keys into
/// float.
constexpr constant float RESCALE_THRESHOLD = 5.5f;

struct ForwardMemory {
  threadgroup Scalar* q;
  /// Keys, and values once S is computed.
  threadgroup Scalar* kv;
  threadgroup float* s;
  threadgroup Scalar* p;
  threadgroup float* scratch;
  threadgroup float* rescale;
  threadgroup RowMetadata* query_metadata;
  threadgroup RowMetadata* key_metadata;
};

/// The state of one row, in each of the threads that share it.
struct SoftmaxState {
  float m;
  /// The sum over this thread's elements of the row.
  float l;
};

/// Turns a tile's S into P, and leaves in `rescale` the factors for the O summed so far.
inline void online_softmax(
    thread SoftmaxState& row,
    thread const ForwardMemory& memory,
    thread const Head& head,
    constant Parameters& parameters,
    int first_query,
    thread const Visit& tile,
    uint thread_index) {
  typedef LaneMap<FORWARD_ROWS, FORWARD_COLUMNS> Lanes;
  Lanes lanes(thread_index);
  int query = first_query + lanes.row;
  float logits[Lanes::ELEMENTS];
  float largest = -INFINITY;
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    int column = lanes.column(element), key = tile.first + column;
    logits[element] = -INFINITY;
    if (column < FORWARD_COLUMNS) {
      threadgroup const RowMetadata& query_metadata = memory.query_metadata[lanes.row];
      threadgroup const RowMetadata& key_metadata = memory.key_metadata[column];
      if (visible(tile, head, parameters, query, key, query_metadata, key_metadata)) {
        float product = memory.s[lanes.row * score_stride(FORWARD_COLUMNS) + column];
        logits[element] = logit_of(product, head, parameters, query, key, query_metadata, key_metadata).value;
      }
      largest = fmax(largest, logits[element]);
    }
  }
  largest = reduce_max<Lanes::PER_ROW>(largest);
  float rescale = 1.0f;
  if (largest > row.m + RESCALE_THRESHOLD) {
    // Before the first key there is nothing to rescale.
    rescale = row.m == -INFINITY ? 1.0f : exp_of(row.m, largest);
    row.m = largest;
  }
  float m = row.m == -INFINITY ? 0.0f : row.m;
  row.l *= rescale;
  for (int element = 0; element < Lanes::ELEMENTS; ++element) {
    if (lanes.column(element) < FORWARD_COLUMNS) {
      float p = exp_of(logits[element], m);
      row.l += p;
      memory.p[lanes.row * row_stride(FORWARD_COLUMNS) + lanes.column(element)] = Scalar(p);
    }
  }
  if (lanes.first_column == 0) {
    memory.rescale[lanes.row] = rescale;
  }
}

/// Writes the log-sum-exp, and leaves in `rescale` the factors that turn O into the output.
inline void finish_rows(
    thread const SoftmaxState& row,
    thread const ForwardMemory& memory,
    constant Parameters& parameters,
    int first_query,
    float sink,
    device float* lse,
    uint thread_index) {
  typedef LaneMap<FORWARD_ROWS, FORWARD_COLUMNS> Lanes;
  Lanes lanes(thread_index);
  float l = reduce_sum<Lanes::PER_ROW>(row.l);
  float m = row.m == -INFINITY ? 0.0f : row.m;
  bool is_empty = l == 0.0f;
  float rescale = 1.0f;
  if (HAS_SINKS) {
    float largest = fmax(m, sink);
    rescale = exp_of(m, largest);
    l = l * rescale + exp_of(sink, largest);
    m = largest;
  }
  if (lanes.first_column == 0) {
    memory.rescale[lanes.row] = is_empty ? 0.0f : rescale / l;
    if (first_query + lanes.row < parameters.queries) {
      lse[first_query + lanes.row] = is_empty ? -INFINITY : m + log(l);
    }
  }
}

/// `out` and `lse` belong to this head. `sink` is read only if the call has sinks.
inline void forward_block(
    thread const ForwardMemory& memory,
    thread const Head& head,
    constant Parameters& parameters,
    int first_query,
    float sink,
    device ResultScalar* out,
    device float* lse,
    Worker worker) {
  constexpr int ROWS = FORWARD_ROWS, COLUMNS = FORWARD_COLUMNS;
  threadgroup float* scratch = memory.scratch + worker.index / 32 * 64;
  load_tile<ROWS, HEAD_DIM>(
      memory.q, query_rows(head, parameters, first_query), head.query_limit - first_query, worker.index);
  load_query_metadata<ROWS>(memory.query_metadata, head, parameters, first_query, worker.index);

  Accumulator<ROWS, VALUE_DIM> acc_o;
  acc_o.clear();
  SoftmaxState row = {-INFINITY, 0.0f};
  Walk<ROWS, COLUMNS, true> walk = walk_keys<ROWS, COLUMNS>(head, parameters, first_query, worker.lane);
  Visit tile;
  while (walk.next(tile, worker.lane)) {
    int valid = head.key_limit - tile.first;
    load_tile<COLUMNS, HEAD_DIM>(memory.kv, key_rows(head, parameters, tile.first), valid, worker.index);
    load_key_metadata<COLUMNS>(memory.key_metadata, head, parameters, tile.first, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<COLUMNS, HEAD_DIM, share_of(ROWS)>(memory.s, memory.q, memory.kv, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_tile<COLUMNS, VALUE_DIM>(memory.kv, value_rows(head, parameters, tile.first), valid, worker.index);
    online_softmax(row, memory, head, parameters, first_query, tile, worker.index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_any(memory.rescale[worker.first_row + worker.lane % 8] != 1.0f)) {
      rescale_rows(acc_o, memory.rescale, scratch, worker);
    }
    multiply_add<COLUMNS>(acc_o, memory.p, memory.kv, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  finish_rows(row, memory, parameters, first_query, sink, lse, worker.index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  rescale_rows(acc_o, memory.rescale, scratch, worker);
  write_rows(
      out + first_query * long(parameters.out.row), parameters.out.row, parameters.queries - first_query, acc_o,
      scratch, worker);
}
