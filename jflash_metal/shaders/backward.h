// What the backward's kernels share: the gradient of one pair, and two products for each tile.
//
//   delta = rowsum(dO * O) - dlse
//   P  = exp(S - lse)
//   dP = dO V^T
//   dS = P * (dP - delta), taken back through bias, soft cap and scale
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// FlashAttention-2, arXiv:2307.08691, section 3.1.2. Every kernel owns what it writes, so nothing is added atomically and
// the same call gives the same bits: dQ, and all sums over keys, belong to blocks of queries (d_query.h), dK, dV and sums
// over queries to blocks of keys (d_key_value.h), and a bias [T, S] that heads or batch entries share to d_bias.h.
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
      d_out + batch * parameters.out.batch + long(head_index) * parameters.out.head, lse + head.rows, delta + head.rows};
}

/// A block of one side stays, tiles of the other stream by. `_heads` holds what the logits are the product of, queries or
/// keys, `_values` what dP is the product of, their output's gradients or values.
struct BackwardMemory {
  threadgroup Scalar* own_heads;
  threadgroup Scalar* own_values;
  threadgroup Scalar* stream_heads;
  /// The same place as `stream_heads` where both do not fit.
  threadgroup Scalar* stream_values;
  threadgroup float* products;
  threadgroup float* d_weights;
  threadgroup Facts* own_facts;
  threadgroup Facts* stream_facts;
};

/// Log-sum-exp and delta of queries first, first + 1, ...
template <int COUNT>
void stage_residuals(
    threadgroup Facts* facts, thread const Residuals& residuals, int first, int queries, uint thread_index) {
  for (int index = int(thread_index); index < COUNT; index += THREADS) {
    float lse = -INFINITY, delta = 0.0f;
    if (first + index < queries) {
      lse = residuals.lse[first + index];
      delta = residuals.delta[first + index];
    }
    // A query that sees no key: exp(S - inf) = 0 makes everything of it zero.
    facts[index].lse = lse == -INFINITY ? INFINITY : lse;
    facts[index].delta = delta;
  }
}

/// What one query and one key give.
struct Pair {
  /// P.
  float weight;
  /// The gradient of the logit, and of the product times the scale.
  float d_logit;
  float d_scaled;
};

inline Pair pair_of(
    float product,
    float d_weight,
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const Facts& query_facts,
    threadgroup const Facts& key_facts,
    bool all_seen) {
  Pair pair = {0.0f, 0.0f, 0.0f};
  if (all_seen || seen(head, parameters, query, key, query_facts, key_facts)) {
    Logit logit = logit_of(product, head, parameters, query, key, query_facts, key_facts);
    pair.weight = exp_of(logit.value, query_facts.lse);
    // What a key that has no weight holds takes no part, be it infinite.
    if (pair.weight != 0.0f) {
      pair.d_logit = pair.weight * (d_weight - query_facts.delta);
      pair.d_scaled = pair.d_logit * logit.slope;
    }
  }
  return pair;
}
