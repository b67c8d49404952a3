// From the product of a query and a key to its logit: scale, soft cap, bias, ALiBi, in that order.
//
// Soft cap: Gemma 2, arXiv:2408.00118, section 2. ALiBi: arXiv:2108.12409, section 3.
#pragma once

#include "walk.h"

struct Logit {
  float value;
  /// d value / d (product * scale).
  float slope;
};

inline Logit logit_of(
    float product,
    thread const Head& head,
    constant Parameters& parameters,
    int query,
    int key,
    threadgroup const RowMetadata& query_metadata,
    threadgroup const RowMetadata& key_metadata) {
  Logit logit = {product * head.scale, 1.0f};
  if (HAS_SOFT_CAP) {
    float curved = precise::tanh(logit.value / parameters.soft_cap);
    logit = Logit{parameters.soft_cap * curved, 1.0f - curved * curved};
  }
  if (BIAS_OF_QUERIES) {
    logit.value += query_metadata.bias;
  }
  if (BIAS_OF_KEYS) {
    logit.value += key_metadata.bias;
  }
  if (BIAS_OF_PAIRS) {
    logit.value += float(head.bias[query * parameters.bias.query + key * parameters.bias.key]);
  }
  if (HAS_ALIBI) {
    logit.value -= head.alibi_slope * float(abs(key - (query + head.offset)));
  }
  return logit;
}

/// exp(value - reference).
inline float exp_of(float value, float reference) { return exp2((value - reference) * LOG2_E); }
