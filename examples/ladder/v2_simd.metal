// V2, float4 and SIMD reductions: a SIMD-group for each row of a tile, 32 lanes for its 32 keys.
//
// A lane has one key of the tile, so a row's largest logit and its sum are one simd_max and one simd_sum, and what was
// summed before shrinks once for 32 keys, not for each. For the sum of values a lane has every 32nd feature. Four
// SIMD-groups take 8 of the 32 queries each. Copies and products go by float4. Keys and then values use the same threadgroup
// memory: with queries it is 32 KiB at head dimension 128, all there is.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  int length;
  float scale;
};

constexpr constant int TILE = 32;
constexpr constant int THREADS = 128;
constexpr constant int ROWS = 8;
constexpr constant int FOURS = HEAD_DIM / 4;
constexpr constant int OWN = (HEAD_DIM + 31) / 32;

void copy(threadgroup float4* to, device const float* from, uint thread_index) {
  for (int i = int(thread_index); i < TILE * FOURS; i += THREADS) {
    to[i] = ((device const float4*)from)[i];
  }
}

kernel void attention(
    device const float* query [[buffer(0)]],
    device const float* key [[buffer(1)]],
    device const float* value [[buffer(2)]],
    device float* out [[buffer(3)]],
    constant Parameters& parameters [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 queries[TILE * FOURS];
  threadgroup float4 stream[TILE * FOURS];
  copy(queries, query + group * TILE * HEAD_DIM, thread_index);
  float largest[ROWS], total[ROWS], weight[ROWS], sum[ROWS][OWN];
  for (int row = 0; row < ROWS; ++row) {
    largest[row] = -INFINITY;
    total[row] = 0.0f;
    for (int i = 0; i < OWN; ++i) {
      sum[row][i] = 0.0f;
    }
  }

  for (int first = 0; first < parameters.length; first += TILE) {
    copy(stream, key + first * HEAD_DIM, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int row = 0; row < ROWS; ++row) {
      float logit = 0.0f;
      for (int i = 0; i < FOURS; ++i) {
        logit += dot(queries[(simdgroup * ROWS + row) * FOURS + i], stream[lane * FOURS + i]);
      }
      logit *= parameters.scale;
      float grown = max(largest[row], simd_max(logit)), shrink = exp(largest[row] - grown);
      weight[row] = exp(logit - grown);
      largest[row] = grown;
      total[row] = total[row] * shrink + simd_sum(weight[row]);
      for (int i = 0; i < OWN; ++i) {
        sum[row][i] *= shrink;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    copy(stream, value + first * HEAD_DIM, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup const float* values = (threadgroup const float*)stream;
    for (int row = 0; row < ROWS; ++row) {
      for (ushort other = 0; other < TILE; ++other) {
        float others = simd_shuffle(weight[row], other);
        for (int i = 0; i < OWN; ++i) {
          int feature = int(lane) + 32 * i;
          if (feature < HEAD_DIM) {
            sum[row][i] += others * values[other * HEAD_DIM + feature];
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int i = 0; i < OWN; ++i) {
      int feature = int(lane) + 32 * i;
      if (feature < HEAD_DIM) {
        out[(group * TILE + simdgroup * ROWS + row) * HEAD_DIM + feature] = sum[row][i] / total[row];
      }
    }
  }
}
