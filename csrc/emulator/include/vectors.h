// Vectors of two, three and four components, and their packed kin without padding.
//
// Swizzles are not members: the translator turns `v.zx` into v.template swizzle<2, 0>(), so unused ones cost no time.
#pragma once

namespace emulator {

template <class T, int N>
struct Components;
template <class T>
struct Components<T, 2> {
  T x, y;
};
template <class T>
struct Components<T, 3> {
  T x, y, z;
};
template <class T>
struct Components<T, 4> {
  T x, y, z, w;
};

// The components as an array; a constant expression, which may not look at them so, goes by name.
template <class V, class T>
constexpr T& component(V& v, T& first, int i) {
  if (!__builtin_is_constant_evaluated()) return reinterpret_cast<T*>(&v)[i];
  if constexpr (requires { v.w; }) {
    if (i == 3) return v.w;
  }
  if constexpr (requires { v.z; }) {
    if (i == 2) return v.z;
  }
  return i == 0 ? first : v.y;
}

}  // namespace emulator

namespace metal {

template <class T, int N>
struct packed_vec;

template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : emulator::Components<T, N> {
  typedef T element_type;
  using emulator::Components<T, N>::x;
  using emulator::Components<T, N>::y;

  vec() = default;
  constexpr vec(T all) {
    x = y = all;
    if constexpr (N > 2) this->z = all;
    if constexpr (N > 3) this->w = all;
  }
  template <class A, class B, class... Rest>
  constexpr vec(const A& a, const B& b, const Rest&... rest) {
    int at = 0;
    take(at, a);
    take(at, b);
    (take(at, rest), ...);
  }
  template <class U>
  explicit constexpr vec(const vec<U, N>& other) {
    x = T(other.x);
    y = T(other.y);
    if constexpr (N > 2) this->z = T(other.z);
    if constexpr (N > 3) this->w = T(other.w);
  }
  constexpr vec(const packed_vec<T, N>& other) {
    x = other.x;
    y = other.y;
    if constexpr (N > 2) this->z = other.z;
    if constexpr (N > 3) this->w = other.w;
  }

  constexpr T& operator[](int i) { return emulator::component(*this, x, i); }
  constexpr const T& operator[](int i) const { return emulator::component(*this, x, i); }

  template <int... I>
  constexpr vec<T, sizeof...(I)> swizzle() const {
    return {(*this)[I]...};
  }
  // What a swizzle on the left of an assignment means.
  template <int... I>
  struct Reference {
    vec& of;
    constexpr operator vec<T, sizeof...(I)>() const { return of.template swizzle<I...>(); }
    constexpr void operator=(vec<T, sizeof...(I)> from) {
      int at = 0;
      ((of[I] = from[at++]), ...);
    }
    constexpr void operator+=(vec<T, sizeof...(I)> b) { *this = of.template swizzle<I...>() + b; }
    constexpr void operator-=(vec<T, sizeof...(I)> b) { *this = of.template swizzle<I...>() - b; }
    constexpr void operator*=(vec<T, sizeof...(I)> b) { *this = of.template swizzle<I...>() * b; }
    constexpr void operator/=(vec<T, sizeof...(I)> b) { *this = of.template swizzle<I...>() / b; }
  };
  template <int... I>
  constexpr Reference<I...> swizzle_reference() {
    return {*this};
  }

#define EMULATOR_BINARY(OP)                                      \
  friend constexpr vec operator OP(const vec& a, const vec& b) { \
    vec r;                                                       \
    r.x = T(a.x OP b.x);                                         \
    r.y = T(a.y OP b.y);                                         \
    if constexpr (N > 2) r.z = T(a.z OP b.z);                    \
    if constexpr (N > 3) r.w = T(a.w OP b.w);                    \
    return r;                                                    \
  }                                                              \
  constexpr vec& operator OP## = (const vec& b) { return *this = *this OP b; }
  EMULATOR_BINARY(+)
  EMULATOR_BINARY(-)
  EMULATOR_BINARY(*)
  EMULATOR_BINARY(/)
  EMULATOR_BINARY(%)
  EMULATOR_BINARY(&)
  EMULATOR_BINARY(|)
  EMULATOR_BINARY(^)
  EMULATOR_BINARY(<<)
  EMULATOR_BINARY(>>)
#undef EMULATOR_BINARY
#define EMULATOR_COMPARE(OP)                                              \
  friend constexpr vec<bool, N> operator OP(const vec& a, const vec& b) { \
    vec<bool, N> r;                                                       \
    r.x = a.x OP b.x;                                                     \
    r.y = a.y OP b.y;                                                     \
    if constexpr (N > 2) r.z = a.z OP b.z;                                \
    if constexpr (N > 3) r.w = a.w OP b.w;                                \
    return r;                                                             \
  }
  EMULATOR_COMPARE(==)
  EMULATOR_COMPARE(!=)
  EMULATOR_COMPARE(<)
  EMULATOR_COMPARE(<=)
  EMULATOR_COMPARE(>)
  EMULATOR_COMPARE(>=)
  EMULATOR_COMPARE(&&)
  EMULATOR_COMPARE(||)
#undef EMULATOR_COMPARE
  friend constexpr vec operator-(const vec& a) { return vec(T(0)) - a; }
  friend constexpr vec operator+(const vec& a) { return a; }
  friend constexpr vec<bool, N> operator!(const vec& a) { return a == vec(T(0)); }
  friend constexpr vec operator~(const vec& a) { return a ^ vec(T(-1)); }

 private:
  template <class A>
  constexpr void take(int& at, const A& scalar) {
    (*this)[at++] = T(scalar);
  }
  template <class U, int M>
  constexpr void take(int& at, const vec<U, M>& part) {
    for (int i = 0; i < M; ++i) (*this)[at++] = T(part[i]);
  }
};

template <class T, int N>
struct packed_vec : emulator::Components<T, N> {
  using emulator::Components<T, N>::x;
  using emulator::Components<T, N>::y;
  packed_vec() = default;
  constexpr packed_vec(const vec<T, N>& other) {
    x = other.x;
    y = other.y;
    if constexpr (N > 2) this->z = other.z;
    if constexpr (N > 3) this->w = other.w;
  }
  template <class... A>
    requires(sizeof...(A) > 1)
  constexpr packed_vec(const A&... parts) : packed_vec(vec<T, N>(parts...)) {}
  constexpr T& operator[](int i) { return emulator::component(*this, x, i); }
  constexpr const T& operator[](int i) const { return emulator::component(*this, x, i); }
  template <int... I>
  constexpr vec<T, sizeof...(I)> swizzle() const {
    return {(*this)[I]...};
  }
  friend constexpr vec<T, N> operator+(const packed_vec& a, const packed_vec& b) { return vec<T, N>(a) + vec<T, N>(b); }
  friend constexpr vec<T, N> operator-(const packed_vec& a, const packed_vec& b) { return vec<T, N>(a) - vec<T, N>(b); }
  friend constexpr vec<T, N> operator*(const packed_vec& a, const packed_vec& b) { return vec<T, N>(a) * vec<T, N>(b); }
  friend constexpr vec<T, N> operator*(const packed_vec& a, T b) { return vec<T, N>(a) * b; }
};

}  // namespace metal

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
