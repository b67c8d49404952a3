// Barriers and the operations of a SIMD-group.
#pragma once

#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulator {

// The element type of a scalar or a vector, and the number of elements.
template <class T>
struct Kind;
#define EMULATOR_KIND(T, NAME)               \
  template <>                                \
  struct Kind<T> {                           \
    static constexpr Type type = Type::NAME; \
    static constexpr int count = 1;          \
  };
EMULATOR_KIND(bool, boolean)
EMULATOR_KIND(char, int8)
EMULATOR_KIND(signed char, int8)
EMULATOR_KIND(uchar, uint8)
EMULATOR_KIND(short, int16)
EMULATOR_KIND(ushort, uint16)
EMULATOR_KIND(int, int32)
EMULATOR_KIND(uint, uint32)
EMULATOR_KIND(long, int64)
EMULATOR_KIND(ulong, uint64)
EMULATOR_KIND(half, float16)
EMULATOR_KIND(bfloat, bfloat16)
EMULATOR_KIND(float, float32)
#undef EMULATOR_KIND
template <class T, int N>
struct Kind<metal::vec<T, N>> {
  static constexpr Type type = Kind<T>::type;
  static constexpr int count = N;
};

template <class T>
inline T collective(Collective what, const T& value, unsigned argument, const char* name, const char* file, int line) {
  T in = value, out;
  metal_emulator_collective(what, Kind<T>::type, Kind<T>::count, &in, &out, argument, name, file, line);
  return out;
}

}  // namespace emulator

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  metal_emulator_threadgroup_barrier(uint(flags), file, line);
}
inline void simdgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  metal_emulator_simdgroup_barrier(uint(flags), file, line);
}

#define EMULATOR_REDUCE(NAME, WHAT)                                                      \
  template <class T>                                                                     \
  inline T NAME(T data, EMULATOR_SITE) {                                                 \
    return emulator::collective(emulator::Collective::WHAT, data, 0, #NAME, file, line); \
  }
EMULATOR_REDUCE(simd_sum, sum)
EMULATOR_REDUCE(simd_product, product)
EMULATOR_REDUCE(simd_min, minimum)
EMULATOR_REDUCE(simd_max, maximum)
EMULATOR_REDUCE(simd_and, bit_and)
EMULATOR_REDUCE(simd_or, bit_or)
EMULATOR_REDUCE(simd_xor, bit_xor)
EMULATOR_REDUCE(simd_prefix_inclusive_sum, inclusive_sum)
EMULATOR_REDUCE(simd_prefix_exclusive_sum, exclusive_sum)
EMULATOR_REDUCE(simd_prefix_inclusive_product, inclusive_product)
EMULATOR_REDUCE(simd_prefix_exclusive_product, exclusive_product)
#undef EMULATOR_REDUCE

#define EMULATOR_MOVE(NAME, WHAT)                                                               \
  template <class T>                                                                            \
  inline T NAME(T data, ushort argument, EMULATOR_SITE) {                                       \
    return emulator::collective(emulator::Collective::WHAT, data, argument, #NAME, file, line); \
  }
EMULATOR_MOVE(simd_shuffle, shuffle)
EMULATOR_MOVE(simd_broadcast, shuffle)
EMULATOR_MOVE(simd_shuffle_xor, shuffle_xor)
EMULATOR_MOVE(simd_shuffle_up, shuffle_up)
EMULATOR_MOVE(simd_shuffle_down, shuffle_down)
EMULATOR_MOVE(simd_shuffle_rotate_up, rotate_up)
EMULATOR_MOVE(simd_shuffle_rotate_down, rotate_down)
#undef EMULATOR_MOVE

template <class T>
inline T simd_broadcast_first(T data, EMULATOR_SITE) {
  return emulator::collective(emulator::Collective::shuffle, data, 0, "simd_broadcast_first", file, line);
}
template <class T>
inline T simd_shuffle_and_fill_up(T data, T filling, ushort distance, EMULATOR_SITE) {
  T in[2] = {data, filling}, out;
  metal_emulator_collective(emulator::Collective::fill_up, emulator::Kind<T>::type, emulator::Kind<T>::count, in, &out,
                            distance, "simd_shuffle_and_fill_up", file, line);
  return out;
}
template <class T>
inline T simd_shuffle_and_fill_down(T data, T filling, ushort distance, EMULATOR_SITE) {
  T in[2] = {data, filling}, out;
  metal_emulator_collective(emulator::Collective::fill_down, emulator::Kind<T>::type, emulator::Kind<T>::count, in,
                            &out, distance, "simd_shuffle_and_fill_down", file, line);
  return out;
}

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t votes = 0) : votes_(votes) {}
  explicit constexpr operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == 0xffffffffu; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};
inline simd_vote simd_ballot(bool vote, EMULATOR_SITE) {
  ulong votes;
  metal_emulator_collective(emulator::Collective::ballot, emulator::Type::boolean, 1, &vote, &votes, 0, "simd_ballot",
                            file, line);
  return simd_vote(votes);
}
inline bool simd_any(bool vote, EMULATOR_SITE) {
  return emulator::collective(emulator::Collective::bit_or, uint(vote), 0, "simd_any", file, line) != 0;
}
inline bool simd_all(bool vote, EMULATOR_SITE) {
  return emulator::collective(emulator::Collective::bit_and, uint(vote), 0, "simd_all", file, line) != 0;
}

#define EMULATOR_QUAD(NAME, OP)                                                                                   \
  template <class T>                                                                                              \
  inline T NAME(T data, EMULATOR_SITE) {                                                                          \
    const T pair = OP(data, emulator::collective(emulator::Collective::shuffle_xor, data, 1, #NAME, file, line)); \
    return OP(pair, emulator::collective(emulator::Collective::shuffle_xor, pair, 2, #NAME, file, line));         \
  }
#define EMULATOR_ADD(a, b) ((a) + (b))
EMULATOR_QUAD(quad_sum, EMULATOR_ADD)
EMULATOR_QUAD(quad_max, max)
EMULATOR_QUAD(quad_min, min)
#undef EMULATOR_ADD
#undef EMULATOR_QUAD
template <class T>
inline T quad_shuffle_xor(T data, ushort mask, EMULATOR_SITE) {
  return emulator::collective(emulator::Collective::shuffle_xor, data, mask, "quad_shuffle_xor", file, line);
}

}  // namespace metal
