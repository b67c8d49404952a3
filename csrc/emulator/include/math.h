// Elementary functions. On half and bfloat they are computed in float and rounded once.
#pragma once

namespace metal {

// One function of floats, for float, half and vectors of them.
#define EMULATOR_UNARY(NAME, CALL)                                \
  inline float NAME(float x) { return CALL(x); }                  \
  inline half NAME(half x) { return half(CALL(float(x))); }       \
  inline bfloat NAME(bfloat x) { return bfloat(CALL(float(x))); } \
  template <class T, int N>                                       \
  inline vec<T, N> NAME(const vec<T, N>& v) {                     \
    vec<T, N> r;                                                  \
    r.x = NAME(v.x);                                              \
    r.y = NAME(v.y);                                              \
    if constexpr (N > 2) r.z = NAME(v.z);                         \
    if constexpr (N > 3) r.w = NAME(v.w);                         \
    return r;                                                     \
  }
EMULATOR_UNARY(exp, metal_emulator_exp)
EMULATOR_UNARY(exp2, metal_emulator_exp2)
EMULATOR_UNARY(exp10, metal_emulator_exp10)
EMULATOR_UNARY(tanh, metal_emulator_tanh)
EMULATOR_UNARY(log, metal_emulator_log)
EMULATOR_UNARY(log2, metal_emulator_log2)
EMULATOR_UNARY(log10, metal_emulator_log10)
EMULATOR_UNARY(sin, metal_emulator_sin)
EMULATOR_UNARY(cos, metal_emulator_cos)
EMULATOR_UNARY(tan, metal_emulator_tan)
EMULATOR_UNARY(sinh, metal_emulator_sinh)
EMULATOR_UNARY(cosh, metal_emulator_cosh)
EMULATOR_UNARY(asin, metal_emulator_asin)
EMULATOR_UNARY(acos, metal_emulator_acos)
EMULATOR_UNARY(atan, metal_emulator_atan)
EMULATOR_UNARY(asinh, metal_emulator_asinh)
EMULATOR_UNARY(acosh, metal_emulator_acosh)
EMULATOR_UNARY(atanh, metal_emulator_atanh)
EMULATOR_UNARY(sqrt, __builtin_sqrtf)
EMULATOR_UNARY(rsqrt, 1.0f / __builtin_sqrtf)
EMULATOR_UNARY(floor, __builtin_floorf)
EMULATOR_UNARY(ceil, __builtin_ceilf)
EMULATOR_UNARY(trunc, __builtin_truncf)
EMULATOR_UNARY(rint, __builtin_rintf)
EMULATOR_UNARY(round, __builtin_roundf)
EMULATOR_UNARY(fabs, __builtin_fabsf)
#undef EMULATOR_UNARY

#define EMULATOR_BINARY(NAME, CALL)                                                   \
  inline float NAME(float a, float b) { return CALL(a, b); }                          \
  inline half NAME(half a, half b) { return half(CALL(float(a), float(b))); }         \
  inline bfloat NAME(bfloat a, bfloat b) { return bfloat(CALL(float(a), float(b))); } \
  EMULATOR_BY_COMPONENT(NAME)
#define EMULATOR_BY_COMPONENT(NAME)                               \
  template <class T, int N>                                       \
  inline vec<T, N> NAME(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r;                                                  \
    r.x = NAME(a.x, b.x);                                         \
    r.y = NAME(a.y, b.y);                                         \
    if constexpr (N > 2) r.z = NAME(a.z, b.z);                    \
    if constexpr (N > 3) r.w = NAME(a.w, b.w);                    \
    return r;                                                     \
  }                                                               \
  template <class T, int N>                                       \
  inline vec<T, N> NAME(const vec<T, N>& a, T b) {                \
    return NAME(a, vec<T, N>(b));                                 \
  }                                                               \
  template <class T, int N>                                       \
  inline vec<T, N> NAME(T a, const vec<T, N>& b) {                \
    return NAME(vec<T, N>(a), b);                                 \
  }
EMULATOR_BINARY(pow, metal_emulator_pow)
EMULATOR_BINARY(powr, metal_emulator_pow)
EMULATOR_BINARY(atan2, metal_emulator_atan2)
EMULATOR_BINARY(fmod, metal_emulator_fmod)
EMULATOR_BINARY(fmax, __builtin_fmaxf)
EMULATOR_BINARY(fmin, __builtin_fminf)
EMULATOR_BINARY(copysign, __builtin_copysignf)

#define EMULATOR_INTEGERS(DO) DO(char) DO(uchar) DO(short) DO(ushort) DO(int) DO(uint) DO(long) DO(ulong)
#define EMULATOR_EXTREMA(T)                                  \
  inline constexpr T max(T a, T b) { return a < b ? b : a; } \
  inline constexpr T min(T a, T b) { return b < a ? b : a; } \
  inline constexpr T abs(T a) { return a < T(0) ? T(-a) : a; }
EMULATOR_INTEGERS(EMULATOR_EXTREMA)
#undef EMULATOR_EXTREMA
inline constexpr float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline constexpr float min(float a, float b) { return __builtin_fminf(a, b); }
inline constexpr half max(half a, half b) { return half(__builtin_fmaxf(float(a), float(b))); }
inline constexpr half min(half a, half b) { return half(__builtin_fminf(float(a), float(b))); }
inline bfloat max(bfloat a, bfloat b) { return bfloat(__builtin_fmaxf(a, b)); }
inline bfloat min(bfloat a, bfloat b) { return bfloat(__builtin_fminf(a, b)); }
inline constexpr float abs(float a) { return __builtin_fabsf(a); }
inline constexpr half abs(half a) { return half(__builtin_fabsf(float(a))); }
EMULATOR_BY_COMPONENT(max)
EMULATOR_BY_COMPONENT(min)
#undef EMULATOR_BINARY
#undef EMULATOR_BY_COMPONENT
#undef EMULATOR_INTEGERS

template <class T, int N>
inline vec<T, N> abs(const vec<T, N>& a) {
  return max(a, -a);
}

// A function of three values of one type; for a vector, of its components.
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, int N>
inline vec<T, N> clamp(const vec<T, N>& x, T low, T high) {
  return min(max(x, low), high);
}
inline float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
inline half saturate(half x) { return clamp(x, half(0), half(1)); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T, int N>
inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = fma(a[i], b[i], c[i]);
  return r;
}
template <class T>
inline T mix(T a, T b, T by) {
  return a + (b - a) * by;
}
template <class T>
inline T select(T no, T yes, bool which) {
  return which ? yes : no;
}
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& no, const vec<T, N>& yes, const vec<bool, N>& which) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = which[i] ? yes[i] : no[i];
  return r;
}
inline float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
inline float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline float fract(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float divide(float a, float b) { return a / b; }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
template <class T, int N>
inline vec<bool, N> isnan(const vec<T, N>& v) {
  return v != v;
}
template <int N>
inline bool all(const vec<bool, N>& v) {
  bool r = v.x && v.y;
  for (int i = 2; i < N; ++i) r = r && v[i];
  return r;
}
template <int N>
inline bool any(const vec<bool, N>& v) {
  bool r = v.x || v.y;
  for (int i = 2; i < N; ++i) r = r || v[i];
  return r;
}
template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T r = a.x * b.x + a.y * b.y;
  if constexpr (N > 2) r += a.z * b.z;
  if constexpr (N > 3) r += a.w * b.w;
  return r;
}
template <class T, int N>
inline T length_squared(const vec<T, N>& v) {
  return dot(v, v);
}
template <class T, int N>
inline T length(const vec<T, N>& v) {
  return sqrt(dot(v, v));
}

inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline int popcount(int x) { return __builtin_popcount(uint(x)); }
inline uint clz(uint x) { return x == 0 ? 32u : uint(__builtin_clz(x)); }
inline uint ctz(uint x) { return x == 0 ? 32u : uint(__builtin_ctz(x)); }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
inline int mulhi(int a, int b) { return int((long(a) * b) >> 32); }

// One accuracy serves all: the emulator does not imitate how coarse the fast functions may be.
namespace fast {
using namespace metal;
}
namespace precise {
using namespace metal;
}

}  // namespace metal
