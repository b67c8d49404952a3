// V3 (TILE_SIZE 32) and V4 (TILE_SIZE 16), SIMD-group matrices: the hardware multiplies 8x8 matrices.
//
// A SIMD-group has 8 queries. Logits and sums are 8x8 matrices in registers. Metal does not define which lane holds
// which element, so the logits go through threadgroup memory for the softmax (four lanes for each row), and a row of
// sums shrinks by a product with a diagonal matrix. Smaller tiles take less threadgroup memory, so that more
// threadgroups run at a time, and read keys and values twice as often.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  int length;
  float scale;
};

constexpr constant int TILE = TILE_SIZE;
constexpr constant int THREADS = TILE / 8 * 32;
constexpr constant int FOURS = HEAD_DIM / 4;

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
  threadgroup float logits[TILE * TILE];
  threadgroup float diagonals[TILE / 8 * 64];
  threadgroup float* diagonal = diagonals + simdgroup * 64;
  threadgroup float* own_logits = logits + simdgroup * 8 * TILE;
  threadgroup const float* own = (threadgroup const float*)queries + simdgroup * 8 * HEAD_DIM;
  threadgroup const float* others = (threadgroup const float*)stream;
  copy(queries, query + group * TILE * HEAD_DIM, thread_index);
  simdgroup_float8x8 sums[HEAD_DIM / 8], left, right;
  for (int piece = 0; piece < HEAD_DIM / 8; ++piece) {
    sums[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  diagonal[lane] = diagonal[lane + 32] = 0.0f;
  uint row = lane / 4, quarter = lane % 4;
  float largest = -INFINITY, total = 0.0f;

  for (int first = 0; first < parameters.length; first += TILE) {
    copy(stream, key + first * HEAD_DIM, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = 0; column < TILE; column += 8) {
      simdgroup_float8x8 products = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (int i = 0; i < HEAD_DIM; i += 8) {
        simdgroup_load(left, own + i, HEAD_DIM);
        simdgroup_load(right, others + column * HEAD_DIM + i, HEAD_DIM, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(products, left, right, products);
      }
      simdgroup_store(products, own_logits + column, TILE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    copy(stream, value + first * HEAD_DIM, thread_index);

    float grown = largest;
    for (int column = int(quarter); column < TILE; column += 4) {
      grown = max(grown, own_logits[row * TILE + column] * parameters.scale);
    }
    grown = max(grown, simd_shuffle_xor(grown, ushort(1)));
    grown = max(grown, simd_shuffle_xor(grown, ushort(2)));
    float shrink = exp(largest - grown);
    largest = grown;
    total *= shrink;
    for (int column = int(quarter); column < TILE; column += 4) {
      float weight = exp(own_logits[row * TILE + column] * parameters.scale - largest);
      own_logits[row * TILE + column] = weight;
      total += weight;
    }
    if (quarter == 0) {
      diagonal[row * 9] = shrink;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(left, diagonal, 8);
    for (int piece = 0; piece < HEAD_DIM / 8; ++piece) {
      right = sums[piece];
      sums[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      simdgroup_multiply_accumulate(sums[piece], left, right, sums[piece]);
    }
    for (int column = 0; column < TILE; column += 8) {
      simdgroup_load(left, own_logits + column, TILE);
      for (int piece = 0; piece < HEAD_DIM / 8; ++piece) {
        simdgroup_load(right, others + column * HEAD_DIM + 8 * piece, HEAD_DIM);
        simdgroup_multiply_accumulate(sums[piece], left, right, sums[piece]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  total += simd_shuffle_xor(total, ushort(1));
  total += simd_shuffle_xor(total, ushort(2));
  if (quarter == 0) {
    diagonal[row * 9] = 1.0f / total;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(left, diagonal, 8);
  for (int piece = 0; piece < HEAD_DIM / 8; ++piece) {
    simdgroup_float8x8 result = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_multiply_accumulate(result, left, sums[piece], result);
    simdgroup_store(result, out + (group * TILE + simdgroup * 8) * HEAD_DIM + 8 * piece, HEAD_DIM);
  }
}
