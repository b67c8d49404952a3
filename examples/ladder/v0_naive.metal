// V0, naive: one thread for each query, everything from device memory.
//
// The largest logit is found first, so every product is made twice; and every query reads all keys and values by itself.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  int length;
  float scale;
};

kernel void attention(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device float* out [[buffer(3)]],
    constant Parameters& parameters [[buffer(4)]],
    uint row [[thread_position_in_grid]]) {
  float largest = -INFINITY;
  for (int other = 0; other < parameters.length; ++other) {
    float product = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) {
      product += query[row * HEAD_DIM + i] * key[other * HEAD_DIM + i];
    }
    largest = max(largest, product * parameters.scale);
  }

  float total = 0.0f, sum[HEAD_DIM];
  for (int i = 0; i < HEAD_DIM; ++i) {
    sum[i] = 0.0f;
  }
  for (int other = 0; other < parameters.length; ++other) {
    float product = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) {
      product += query[row * HEAD_DIM + i] * key[other * HEAD_DIM + i];
    }
    float weight = exp(product * parameters.scale - largest);
    total += weight;
    for (int i = 0; i < HEAD_DIM; ++i) {
      sum[i] += weight * value[other * HEAD_DIM + i];
    }
  }
  for (int i = 0; i < HEAD_DIM; ++i) {
    out[row * HEAD_DIM + i] = sum[i] / total;
  }
}
