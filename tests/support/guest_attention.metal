// Attention in the style of kernels that keep S, P and O in registers: a guest of the emulator, not one of jflash's shaders.
//
// Rows are reduced by shuffles between the lanes that hold them, so the kernel relies on the lane layout that Apple's
// GPUs are known to have. Arrays are [B, L, heads, features]; one SIMD-group has 8 queries, a threadgroup 32.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

constant bool keys_fill_tiles [[function_constant(10)]];
constant bool is_causal [[function_constant(11)]];
constant bool has_mask [[function_constant(12)]];

struct Shape {
  int queries, keys, heads, group;
  float scale;  // of logits in base 2
};

namespace guest {

template <typename T>
struct pointer_element {};
template <typename T>
struct pointer_element<device T*> {
  using type = remove_cv_t<T>;
};
template <typename T>
struct pointer_element<threadgroup T*> {
  using type = remove_cv_t<T>;
};
template <typename T>
struct pointer_element<constant T*> {
  using type = remove_cv_t<T>;
};

// Two neighbours of a row of an 8x8 matrix, in each lane.
struct Fragment {
  typedef vec<float, 2> Pair;
  typedef simdgroup_matrix<float, 8, 8> Matrix;

  METAL_FUNC static short row(ushort lane) { return (lane / 4 & 4) + lane / 2 % 4; }
  METAL_FUNC static short column(ushort lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

  template <typename Pointer>
  METAL_FUNC static Pair load(Pointer source, int row_stride, int column_stride, ushort lane) {
    using Element = remove_cv_t<remove_addrspace_t<remove_reference_t<decltype(*source)>>>;
    static_assert(is_same_v<Element, typename pointer_element<Pointer>::type>, "both name the element");
    source += row(lane) * row_stride + column(lane) * column_stride;
    return Pair{static_cast<float>(source[0]), static_cast<float>(source[column_stride])};
  }

  METAL_FUNC static void multiply_add(thread Pair& sum, thread const Pair& left, thread const Pair& right) {
    Matrix a, b, c;
    reinterpret_cast<thread Pair&>(a.thread_elements()) = left;
    reinterpret_cast<thread Pair&>(b.thread_elements()) = right;
    reinterpret_cast<thread Pair&>(c.thread_elements()) = sum;
    simdgroup_multiply_accumulate(c, a, b, c);
    sum = reinterpret_cast<thread Pair&>(c.thread_elements());
  }

  // The four lanes of a row differ in bits 0 and 3.
  template <typename Op>
  METAL_FUNC static float reduce_row(thread const Pair& pair) {
    float both = Op::apply(pair.x, pair.y);
    both = Op::apply(both, simd_shuffle_xor(both, ushort(1)));
    return Op::apply(both, simd_shuffle_xor(both, ushort(8)));
  }
};

struct Maximum {
  METAL_FUNC static float apply(float x, float y) { return metal::max(x, y); }
};
struct Sum {
  METAL_FUNC static float apply(float x, float y) { return x + y; }
};

// Copies blocks of rows that follow each other to threadgroup memory, rows past the end as zeros.
template <typename T, short ROWS, short COLUMNS, short STRIDE, short THREADS>
struct BlockLoader {
  static constant constexpr const short PER_ROW = COLUMNS / 4;
  const device T* source;
  threadgroup T* target;
  const int row_stride;
  const short thread_index;

  METAL_FUNC BlockLoader(const device T* source_, threadgroup T* target_, int row_stride_, ushort thread_index_)
      : source(source_), target(target_), row_stride(row_stride_), thread_index(thread_index_) {}

  METAL_FUNC void load(int valid_rows) const {
    for (short i = thread_index; i < ROWS * PER_ROW; i += THREADS) {
      const short row = i / PER_ROW, column = i % PER_ROW * 4;
      vec<T, 4> four = vec<T, 4>(T(0));
      if (row < valid_rows) four = *(const device vec<T, 4>*)(source + row * row_stride + column);
      *(threadgroup vec<T, 4>*)(target + row * STRIDE + column) = four;
    }
  }

  METAL_FUNC void next() { source += ROWS * row_stride; }
};

}  // namespace guest

template <typename T, short HEAD_DIM, short BLOCK_Q = 32, short BLOCK_K = 16>
[[kernel, max_total_threads_per_threadgroup(BLOCK_Q * 4)]] void attend(
    const device T* query [[buffer(0)]],
    const device T* key [[buffer(1)]],
    const device T* value [[buffer(2)]],
    const device bool* mask [[buffer(3), function_constant(has_mask)]],
    device T* out [[buffer(4)]],
    const constant Shape& shape [[buffer(5)]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]]) {
  using guest::Fragment;
  constexpr short STRIDE = HEAD_DIM + 16 / sizeof(T), THREADS = BLOCK_Q * 4;
  threadgroup T q_smem[BLOCK_Q * STRIDE];
  threadgroup T kv_smem[BLOCK_K * STRIDE];
  const int batch = group.z, head = group.y, first_query = group.x * BLOCK_Q, key_heads = shape.heads / shape.group;
  const int q_stride = shape.heads * HEAD_DIM, kv_stride = key_heads * HEAD_DIM;
  const int q_start = (batch * shape.queries + first_query) * q_stride + head * HEAD_DIM;
  const int kv_start = batch * shape.keys * kv_stride + head / shape.group * HEAD_DIM;
  const ushort thread_index = simdgroup * 32 + lane;
  const int row = Fragment::row(lane), column = Fragment::column(lane), i = first_query + int(simdgroup) * 8 + row;

  guest::BlockLoader<T, BLOCK_Q, HEAD_DIM, STRIDE, THREADS> load_q(query + q_start, q_smem, q_stride, thread_index);
  guest::BlockLoader<T, BLOCK_K, HEAD_DIM, STRIDE, THREADS> load_k(key + kv_start, kv_smem, kv_stride, thread_index);
  guest::BlockLoader<T, BLOCK_K, HEAD_DIM, STRIDE, THREADS> load_v(value + kv_start, kv_smem, kv_stride, thread_index);
  load_q.load(shape.queries - first_query);

  float m = numeric_limits<float>::lowest(), l = 0;
  Fragment::Pair acc_o[HEAD_DIM / 8];
  UNROLL for (short d = 0; d < HEAD_DIM / 8; ++d) acc_o[d] = Fragment::Pair(0);

  const int stop = is_causal ? min(shape.keys, first_query + BLOCK_Q) : shape.keys;
  for (int first_key = 0; first_key < stop; first_key += BLOCK_K) {
    const int valid_keys = keys_fill_tiles ? BLOCK_K : shape.keys - first_key;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_k.load(valid_keys);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragment::Pair s[BLOCK_K / 8];
    float m_new = m;
    UNROLL for (short j = 0; j < BLOCK_K / 8; ++j) {
      s[j] = Fragment::Pair(0);
      for (short d = 0; d < HEAD_DIM; d += 8) {
        const Fragment::Pair q = Fragment::load(q_smem + simdgroup * 8 * STRIDE + d, STRIDE, 1, lane);
        Fragment::multiply_add(s[j], q, Fragment::load(kv_smem + j * 8 * STRIDE + d, 1, STRIDE, lane));
      }
      UNROLL for (short element = 0; element < 2; ++element) {
        const int key_index = first_key + j * 8 + column + element;
        bool visible = key_index < shape.keys && !(is_causal && key_index > i);
        if (has_mask && visible && i < shape.queries)
          visible = mask[((batch * shape.heads + head) * shape.queries + i) * shape.keys + key_index];
        s[j][element] = visible ? s[j][element] * shape.scale : -INFINITY;
      }
      m_new = max(m_new, Fragment::reduce_row<guest::Maximum>(s[j]));
    }
    const float rescale = fast::exp2(m - m_new);
    m = m_new;
    l *= rescale;
    UNROLL for (short j = 0; j < BLOCK_K / 8; ++j) {
      s[j] = Fragment::Pair{fast::exp2(s[j].x - m), fast::exp2(s[j].y - m)};
      l += Fragment::reduce_row<guest::Sum>(s[j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_v.load(valid_keys);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (short d = 0; d < HEAD_DIM / 8; ++d) {
      acc_o[d] *= rescale;
      UNROLL for (short j = 0; j < BLOCK_K / 8; ++j)
        Fragment::multiply_add(acc_o[d], s[j], Fragment::load(kv_smem + j * 8 * STRIDE + d * 8, STRIDE, 1, lane));
    }
    load_k.next();
    load_v.next();
  }
  if (i >= shape.queries) return;
  out += q_start + (int(simdgroup) * 8 + row) * q_stride;
  UNROLL for (short d = 0; d < HEAD_DIM / 8; ++d) {
    UNROLL for (short element = 0; element < 2; ++element)
      out[d * 8 + column + element] = T(l == 0 ? 0 : acc_o[d][element] / l);
  }
}

#define INSTANTIATE(type, head_dim) \
  template [[host_name("attend_" #type "_" #head_dim)]] [[kernel]] decltype(attend<type, head_dim>) attend<type, head_dim>;
INSTANTIATE(float, 64)
INSTANTIATE(float, 128)
INSTANTIATE(half, 64)
