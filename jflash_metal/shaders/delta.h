// delta = rowsum(dO * O) - dlse, which every dS of a row subtracts. One SIMD-group for each row.
#pragma once

#include "operands.h"

inline void delta_row(
    device const Scalar* out,
    device const Scalar* d_out,
    device const float* lse,
    device const float* d_lse,
    device float* delta,
    constant Parameters& parameters,
    int batch,
    int head,
    int query,
    uint lane) {
  if (query >= parameters.queries) {
    return;
  }
  long row = (long(batch) * parameters.heads + head) * parameters.queries + query;
  long first = batch * parameters.out.batch + query * long(parameters.out.row) + long(head) * parameters.out.head;
  // A query that sees no key has no gradient, even where it is padding with NaN in dO.
  bool is_empty = simd_any(lane == 0 && lse[row] == -INFINITY);
  float sum = 0.0f;
  if (!is_empty) {
    for (int feature = int(lane); feature < VALUE_DIM; feature += 32) {
      sum += float(out[first + feature]) * float(d_out[first + feature]);
    }
  }
  // The sum is a tree: with few keys dP is nearly delta, and Metal does not define the order in which `simd_sum` adds.
  sum = reduce_sum<32>(sum);
  if (lane == 0) {
    delta[row] = is_empty ? 0.0f : sum - d_lse[row];
  }
}
