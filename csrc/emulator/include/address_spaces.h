// The Metal language with its address spaces, for clang's check of them. Nothing here can be run: vectors are clang's
// own, whose swizzles and loads respect address spaces, and library functions are only declared.
#pragma once

#include "scalars.h"

typedef __bf16 bfloat;

#include "traits.h"

#define EMULATOR_DEVICE __attribute__((address_space(1)))
#define EMULATOR_CONSTANT __attribute__((address_space(2)))
#define EMULATOR_THREADGROUP __attribute__((address_space(3)))

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N>
using packed_vec = T __attribute__((ext_vector_type(N), aligned(sizeof(T))));

template <class T>
struct remove_addrspace {
  typedef T type;
};
#define EMULATOR_REMOVE(SPACE)        \
  template <class T>                  \
  struct remove_addrspace<SPACE T> {  \
    typedef T type;                   \
  };
EMULATOR_REMOVE(EMULATOR_DEVICE)
EMULATOR_REMOVE(EMULATOR_CONSTANT)
EMULATOR_REMOVE(EMULATOR_THREADGROUP)
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class To, class From>
To as_type(From);

#define EMULATOR_LIKE_ITS_ARGUMENT(NAME) \
  template <class T>                     \
  T NAME(T);
#define EMULATOR_UNARY(DO)                                                                                           \
  DO(exp)                                                                                                            \
  DO(exp2) DO(exp10) DO(tanh) DO(log) DO(log2) DO(log10) DO(sin) DO(cos) DO(tan) DO(sinh) DO(cosh) DO(asin) DO(acos) \
      DO(atan) DO(asinh) DO(acosh) DO(atanh) DO(sqrt) DO(rsqrt) DO(floor) DO(ceil) DO(trunc) DO(rint) DO(round)      \
          DO(fabs) DO(abs) DO(saturate) DO(sign) DO(fract) DO(popcount) DO(clz) DO(ctz) DO(normalize) DO(simd_sum)   \
              DO(simd_product) DO(simd_min) DO(simd_max) DO(simd_and) DO(simd_or) DO(simd_xor)                       \
                  DO(simd_prefix_inclusive_sum) DO(simd_prefix_exclusive_sum) DO(simd_prefix_inclusive_product)      \
                      DO(simd_prefix_exclusive_product) DO(simd_broadcast_first) DO(quad_sum) DO(quad_max)           \
                          DO(quad_min)
EMULATOR_UNARY(EMULATOR_LIKE_ITS_ARGUMENT)

#define EMULATOR_LIKE_A_SUM(NAME) \
  template <class A, class B>     \
  auto NAME(A a, B b) -> decltype(a + b);
EMULATOR_LIKE_A_SUM(fmax)
EMULATOR_LIKE_A_SUM(fmin)
EMULATOR_LIKE_A_SUM(pow)
EMULATOR_LIKE_A_SUM(powr)
EMULATOR_LIKE_A_SUM(fmod)
EMULATOR_LIKE_A_SUM(atan2)
EMULATOR_LIKE_A_SUM(copysign)
EMULATOR_LIKE_A_SUM(step)
EMULATOR_LIKE_A_SUM(divide)
EMULATOR_LIKE_A_SUM(mulhi)
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  return b < a ? b : a;
}
template <class A, int N>
vec<A, N> max(vec<A, N>, vec<A, N>);
template <class A, int N>
vec<A, N> min(vec<A, N>, vec<A, N>);
template <class T, class A, class B>
auto clamp(T x, A a, B b) -> decltype(x + a + b);
template <class T, class A, class B>
auto mix(T x, A a, B b) -> decltype(x + a + b);
template <class T, class A, class B>
auto fma(T x, A a, B b) -> decltype(x + a + b);
template <class A, class B, class C>
auto select(A a, B b, C) -> decltype(a + b);
template <class T>
T ldexp(T, int);
template <class T>
T simd_shuffle(T, ushort);
template <class T>
T simd_broadcast(T, ushort);
template <class T>
T simd_shuffle_xor(T, ushort);
template <class T>
T simd_shuffle_up(T, ushort);
template <class T>
T simd_shuffle_down(T, ushort);
template <class T>
T simd_shuffle_rotate_up(T, ushort);
template <class T>
T simd_shuffle_rotate_down(T, ushort);
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort);
template <class T>
T quad_shuffle_xor(T, ushort);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);
template <class T>
bool all(T);
template <class T>
bool any(T);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool signbit(float);
bool simd_any(bool);
bool simd_all(bool);
class simd_vote {
 public:
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);

namespace fast {
using namespace metal;
}
namespace precise {
using namespace metal;
}

enum class mem_flags : uint { mem_none, mem_device, mem_threadgroup, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr mem_flags operator|(mem_flags a, mem_flags) { return a; }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
#define EMULATOR_MATRIX_MEMORY(SPACE)                                                                          \
  template <class T>                                                                                           \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong = 8, vec<ulong, 2> = 0, bool = false); \
  template <class T>                                                                                           \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, SPACE T*, ulong = 8, vec<ulong, 2> = 0, bool = false);
EMULATOR_MATRIX_MEMORY(EMULATOR_DEVICE)
EMULATOR_MATRIX_MEMORY(EMULATOR_THREADGROUP)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
#define EMULATOR_ATOMIC(NAME, SPACE) \
  template <class T, class U>        \
  T NAME(volatile SPACE atomic<T>*, U, memory_order);
#define EMULATOR_ATOMICS(SPACE)                                          \
  template <class T>                                                     \
  T atomic_load_explicit(const volatile SPACE atomic<T>*, memory_order); \
  EMULATOR_ATOMIC(atomic_store_explicit, SPACE)                          \
  EMULATOR_ATOMIC(atomic_exchange_explicit, SPACE)                       \
  EMULATOR_ATOMIC(atomic_fetch_add_explicit, SPACE)                      \
  EMULATOR_ATOMIC(atomic_fetch_sub_explicit, SPACE)                      \
  EMULATOR_ATOMIC(atomic_fetch_min_explicit, SPACE)                      \
  EMULATOR_ATOMIC(atomic_fetch_max_explicit, SPACE)                      \
  EMULATOR_ATOMIC(atomic_fetch_and_explicit, SPACE)                      \
  EMULATOR_ATOMIC(atomic_fetch_or_explicit, SPACE)                       \
  EMULATOR_ATOMIC(atomic_fetch_xor_explicit, SPACE)                      \
  template <class T, class U>                                            \
  bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>*, T*, U, memory_order, memory_order);
EMULATOR_ATOMICS(EMULATOR_DEVICE)
EMULATOR_ATOMICS(EMULATOR_THREADGROUP)

}  // namespace metal

using metal::as_type;

namespace emulator {

// Vectors from parts, which clang does not make by a cast.
template <class V, class... Parts>
constexpr V make(Parts... parts) {
  if constexpr (sizeof...(Parts) == 1)
    return (V(parts), ...);
  else
    return V(0);
}

template <class T>
EMULATOR_THREADGROUP T& threadgroup_variable(int id, const char* name);

}  // namespace emulator

#define EMULATOR_VECTORS(T, NAME)                   \
  typedef metal::vec<T, 2> NAME##2;                 \
  typedef metal::vec<T, 3> NAME##3;                 \
  typedef metal::vec<T, 4> NAME##4;                 \
  typedef metal::packed_vec<T, 2> packed_##NAME##2; \
  typedef metal::packed_vec<T, 3> packed_##NAME##3; \
  typedef metal::packed_vec<T, 4> packed_##NAME##4;
EMULATOR_VECTORS(bool, bool)
EMULATOR_VECTORS(char, char)
EMULATOR_VECTORS(uchar, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, ushort)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, uint)
EMULATOR_VECTORS(long, long)
EMULATOR_VECTORS(ulong, ulong)
EMULATOR_VECTORS(half, half)
EMULATOR_VECTORS(bfloat, bfloat)
EMULATOR_VECTORS(float, float)
#undef EMULATOR_VECTORS
