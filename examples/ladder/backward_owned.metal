// The backward without atomics: a kernel whose threadgroups own queries, and one whose threadgroups own keys.
//
//   P = exp(logits - lse);  dS = P * (dO V^T - delta)
//   dQ += dS K;  dK += dS^T Q;  dV += P^T dO            (FlashAttention-2, arXiv:2307.08691)
//
// Each tile's P and dS are made twice, once for either kernel. In return a result is written once, by the one who has summed it
// in registers, and is the same to the last bit on every run.
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

kernel void d_query(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device const float* d_out [[buffer(3)]],
    device const float* lse [[buffer(4)]],
    device const float* delta [[buffer(5)]],
    device float* d_query [[buffer(6)]],
    constant Parameters& parameters [[buffer(7)]],
    uint row [[thread_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float keys[TILE * HEAD_DIM];
  threadgroup float values[TILE * HEAD_DIM];
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
      float d_logit = exp(product * parameters.scale - own_lse) * (d_weight - own_delta) * parameters.scale;
      for (int i = 0; i < HEAD_DIM; ++i) {
        sum[i] += d_logit * keys[other * HEAD_DIM + i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < HEAD_DIM; ++i) {
    d_query[row * HEAD_DIM + i] = sum[i];
  }
}

kernel void d_key_value(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device const float* d_out [[buffer(3)]],
    device const float* lse [[buffer(4)]],
    device const float* delta [[buffer(5)]],
    device float* d_key [[buffer(6)]],
    device float* d_value [[buffer(7)]],
    constant Parameters& parameters [[buffer(8)]],
    uint row [[thread_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float queries[TILE * HEAD_DIM];
  threadgroup float d_outs[TILE * HEAD_DIM];
  float own_key[HEAD_DIM], own_value[HEAD_DIM], key_sum[HEAD_DIM], value_sum[HEAD_DIM];
  for (int i = 0; i < HEAD_DIM; ++i) {
    own_key[i] = key[row * HEAD_DIM + i];
    own_value[i] = value[row * HEAD_DIM + i];
    key_sum[i] = value_sum[i] = 0.0f;
  }
  for (int first = 0; first < parameters.length; first += TILE) {
    copy(queries, query + first * HEAD_DIM, lane);
    copy(d_outs, d_out + first * HEAD_DIM, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int other = 0; other < TILE; ++other) {
      float product = 0.0f, d_weight = 0.0f;
      for (int i = 0; i < HEAD_DIM; ++i) {
        product += own_key[i] * queries[other * HEAD_DIM + i];
        d_weight += own_value[i] * d_outs[other * HEAD_DIM + i];
      }
      float weight = exp(product * parameters.scale - lse[first + other]);
      float d_logit = weight * (d_weight - delta[first + other]) * parameters.scale;
      for (int i = 0; i < HEAD_DIM; ++i) {
        key_sum[i] += d_logit * queries[other * HEAD_DIM + i];
        value_sum[i] += weight * d_outs[other * HEAD_DIM + i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < HEAD_DIM; ++i) {
    d_key[row * HEAD_DIM + i] = key_sum[i];
    d_value[row * HEAD_DIM + i] = value_sum[i];
  }
}
