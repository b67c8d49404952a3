// The backward with atomic adds: each threadgroup has 32 queries, and all of them add to dK and dV.
//
//   P = exp(logits - lse);  dS = P * (dO V^T - delta)
//   dQ += dS K;  dK += dS^T Q;  dV += P^T dO            (FlashAttention-2, arXiv:2307.08691)
//
// One pass makes each tile's P and dS once. But a block of queries owns no key: for every tile, every element of dK and dV is
// added to in device memory, in an order that differs from run to run, and so do the last bits of the result.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  int length;
  float scale;
};

constexpr constant int TILE = 32;

void copy(threadgroup float* to, device const float* from, uint lane) {
  for (int i = int(lane); i < TILE * HEAD_DIM; i += TILE) {
    to[i] = from[i];
  }
}

kernel void backward(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device const float* d_out [[buffer(3)]],
    device const float* lse [[buffer(4)]],
    device const float* delta [[buffer(5)]],
    // 6 and 7 are the zeros that d_key and d_value start from: the same memory.
    device atomic_float* d_key [[buffer(8)]],
    device atomic_float* d_value [[buffer(9)]],
    device float* d_query [[buffer(10)]],
    constant Parameters& parameters [[buffer(11)]],
    uint row [[thread_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float keys[TILE * HEAD_DIM];
  threadgroup float values[TILE * HEAD_DIM];
  threadgroup float weights[TILE * TILE];
  threadgroup float d_logits[TILE * TILE];
  float own[HEAD_DIM], d_own[HEAD_DIM], sum[HEAD_DIM];
  for (int i = 0; i < HEAD_DIM; ++i) {
    own[i] = query[row * HEAD_DIM + i];
    d_own[i] = d_out[row * HEAD_DIM + i];
    sum[i] = 0.0f;
  }
  float own_lse = lse[row], own_delta = delta[row];

  for (int first = 0; first < parameters.length; first += TILE) {
    copy(keys, key + first * HEAD_DIM, lane);
    copy(values, value + first * HEAD_DIM, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int other = 0; other < TILE; ++other) {
      float product = 0.0f, d_weight = 0.0f;
      for (int i = 0; i < HEAD_DIM; ++i) {
        product += own[i] * keys[other * HEAD_DIM + i];
        d_weight += d_own[i] * values[other * HEAD_DIM + i];
      }
      float weight = exp(product * parameters.scale - own_lse);
      float d_logit = weight * (d_weight - own_delta) * parameters.scale;
      for (int i = 0; i < HEAD_DIM; ++i) {
        sum[i] += d_logit * keys[other * HEAD_DIM + i];
      }
      weights[lane * TILE + other] = weight;
      d_logits[lane * TILE + other] = d_logit;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Now a thread has a key, and sums what the 32 queries give it; their rows take the place of keys and values.
    for (int i = 0; i < HEAD_DIM; ++i) {
      keys[lane * HEAD_DIM + i] = own[i];
      values[lane * HEAD_DIM + i] = d_own[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < HEAD_DIM; ++i) {
      float key_part = 0.0f, value_part = 0.0f;
      for (int other = 0; other < TILE; ++other) {
        key_part += d_logits[other * TILE + lane] * keys[other * HEAD_DIM + i];
        value_part += weights[other * TILE + lane] * values[other * HEAD_DIM + i];
      }
      int to = (first + int(lane)) * HEAD_DIM + i;
      atomic_fetch_add_explicit(d_key + to, key_part, memory_order_relaxed);
      atomic_fetch_add_explicit(d_value + to, value_part, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < HEAD_DIM; ++i) {
    d_query[row * HEAD_DIM + i] = sum[i];
  }
}
