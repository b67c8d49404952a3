// V1, tiled: 32 queries share what is read of keys and values, and one pass is enough.
//
// Still one thread for each query. A tile of 32 keys comes to threadgroup memory, where all 32 queries use it: device
// memory is read a 32nd as often. Online softmax (arXiv:1805.02867) keeps the largest logit so far, and when it grows
// shrinks what was summed before, so the logits need not be known beforehand.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  int length;
  float scale;
};

constexpr constant int TILE = 32;

kernel void attention(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device float* out [[buffer(3)]],
    constant Parameters& parameters [[buffer(4)]],
    uint row [[thread_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float keys[TILE * HEAD_DIM];
  threadgroup float values[TILE * HEAD_DIM];
  float own[HEAD_DIM], sum[HEAD_DIM];
  for (int i = 0; i < HEAD_DIM; ++i) {
    own[i] = query[row * HEAD_DIM + i] * parameters.scale;
    sum[i] = 0.0f;
  }
  float largest = -INFINITY, total = 0.0f;

  for (int first = 0; first < parameters.length; first += TILE) {
    for (int i = int(lane); i < TILE * HEAD_DIM; i += TILE) {
      keys[i] = key[first * HEAD_DIM + i];
      values[i] = value[first * HEAD_DIM + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int other = 0; other < TILE; ++other) {
      float logit = 0.0f;
      for (int i = 0; i < HEAD_DIM; ++i) {
        logit += own[i] * keys[other * HEAD_DIM + i];
      }
      float grown = max(largest, logit), shrink = exp(largest - grown), weight = exp(logit - grown);
      largest = grown;
      total = total * shrink + weight;
      for (int i = 0; i < HEAD_DIM; ++i) {
        sum[i] = sum[i] * shrink + weight * values[other * HEAD_DIM + i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < HEAD_DIM; ++i) {
    out[row * HEAD_DIM + i] = sum[i] / total;
  }
}
