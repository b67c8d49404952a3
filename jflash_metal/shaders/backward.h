// What the backward's kernels share: dS of one query and one key.
//
//   delta = rowsum(dO * O) - dlse
//   P  = exp(S - lse)
//   dP = dO V^T
//   dS = P * (dP - delta), taken back through bias, soft cap and scale
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// FlashAttention-2, arXiv:2307.08691, section 3.1.2. Every kernel owns what it writes, so it needs no atomics, and the
// same call gives the same bits. Blocks of queries own dQ and all sums over keys (d_query.h), blocks of keys own dK, dV
// and all sums over queries (d_key_value.h). A bias [T, S] that is shared has a kernel of its own (d_bias.h).
#pragma once

#include "scores.h"

/// Results of the forward and their gradients, of one head.
struct Residuals {
  device const Scalar* d_out;
  device const float* lse;
  device const float* delta;
};

inline Residuals residuals_of(
    device const Scalar* d_out,
    device const float* lse,
    device const float* delta,
    thread const Head& head,
    constant Parameters& parameters,
    int batch,
    int head_index) {
  return Residuals{
      d_out + batch * parameters.out.batch + long(head_index) * parameters.out.head, lse + head.rows,
      delta + head.rows};
}

/// A block of one side stays while tiles of the other side stream by. `_qk` is the operand of S, queries or keys;
/// `_vdo` is the operand of dP, values or gradients of the output.
struct BackwardMemory {
  threadgroup Scalar* block_qk;
  threadgroup Scalar* block_vdo;
  threadgroup Scalar* tile_qk;
  /// Shares memory with `tile_qk` where both do not fit.
  threadgroup Scalar* tile_vdo;
  threadgroup float* s;
  threadgroup float* dp;
  threadgroup RowMetadata* block_metadata;
  threadgroup RowMetadata* tile_metadata;
};

/// Rows of dO. A query that sees no key has P = 0, so its finite numbers add nothing; others become 0, as 0 * NaN is NaN.
/// The log-sum-exp is looked up for those alone.
struct SeeingRows {
  typedef Scalar Element;
  Rows rows;
  device const float* lse;

  bool is_kept(int) const { return true; }
  device const Scalar* at(int row) const { return rows.at(row); }
  Scalar4 widened(Scalar4 four, int row) const {
    float zero = 0.0f * (float(four.x) + float(four.y) + float(four.z) + float(four.w));
    bool stays = !HIDDEN_ROWS_HAVE_COTANGENTS || zero == 0.0f || lse[row] != -INFINITY;
    return stays ? four : Scalar4(Scalar(0.0f));
  }
};

inline SeeingRows d_out_rows(thread const Residuals& residuals, constant Parameters& parameters, int first) {
  return SeeingRows{
      Rows{residuals.d_out + first * long(parameters.out.row), parameters.out.row}, residuals.lse + first};
}

/// Loads the log-sum-exp and delta of COUNT queries from `first` on.
template <int COUNT>
void load_row_statistics(
    threadgroup RowMetadata* metadata, thread const Residuals& residuals, int first, int queries, uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    float lse = -INFINITY, delta = 0.0f;
    if (first + index < queries) {
      lse = residuals.lse[first + index];
      delta = residuals.delta[first + index];
    }
    // For a query that sees no key, exp(S - inf) = 0 makes all gradients zero.
    metadata[index].lse = lse == -INFINITY ? INFINITY : lse;
    metadata[index].delta = delta;
  }
}

/// The gradients of one query and one key.
struct ScoreGradient {
  float p;
  /// The gradients of the logit and of the scaled product.
  float d_logit;
  float d_scaled;
};

inline ScoreGradient score_gradient(
    float product,
    float dp,
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const RowMetadata& query_metadata,
    threadgroup const RowMetadata& key_metadata,
    thread const Visit& tile) {
  ScoreGradient gradient = {0.0f, 0.0f, 0.0f};
  if (visible(tile, head, parameters, query, key, query_metadata, key_metadata)) {
    Logit logit = logit_of(product, head, parameters, query, key, query_metadata, key_metadata);
    gradient.p = exp_of(logit.value, query_metadata.lse);
    // Where P is 0, an infinite dP must not make a NaN.
    if (gradient.p != 0.0f) {
      gradient.d_logit = gradient.p * (dp - query_metadata.delta);
      gradient.d_scaled = gradient.d_logit * logit.slope;
    }
  }
  return gradient;
}
