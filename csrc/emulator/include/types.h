// Scalar types, traits and limits.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef decltype(sizeof 0) size_t;
typedef decltype((char*)0 - (char*)0) ptrdiff_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef _Float16 half;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282346638528859811704183484516925440e+38f
#define FLT_MAX MAXFLOAT
#define FLT_MIN 1.17549435082228750796873653722224567781866e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_PI_4_F 0.785398163397448309615660845819875721f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_2_PI_F 0.636619772367581343075535053490057448f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f
#define METAL_FUNC inline
#define METAL_CONST const

// The upper half of a float, rounded to nearest, ties to even. From a number only by a cast, as the language asks.
struct bfloat {
  unsigned short bits;

  bfloat() = default;
  template <class T>
  explicit constexpr bfloat(T number) : bits(round(static_cast<float>(number))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16); }

  bfloat& operator+=(float b) { return *this = bfloat(float(*this) + b); }
  bfloat& operator-=(float b) { return *this = bfloat(float(*this) - b); }
  bfloat& operator*=(float b) { return *this = bfloat(float(*this) * b); }
  bfloat& operator/=(float b) { return *this = bfloat(float(*this) / b); }
  friend bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
  friend bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
  friend bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
  friend bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
  friend bfloat operator-(bfloat a) { return bfloat(-float(a)); }

 private:
  static constexpr unsigned short round(float number) {
    const unsigned word = __builtin_bit_cast(unsigned, number);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((word >> 16) | 0x40u);
    return static_cast<unsigned short>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

namespace metal {

using ::bfloat;
using ::half;

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
struct remove_volatile {
  typedef T type;
};
template <class T>
struct remove_volatile<volatile T> {
  typedef T type;
};
template <class T>
struct remove_cv {
  typedef typename remove_volatile<remove_const_t<T>>::type type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_pointer {
  typedef T type;
};
template <class T>
struct remove_pointer<T*> {
  typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <class T>
using decay_t = remove_cv_t<remove_reference_t<T>>;

template <class T>
struct is_integral : false_type {};
template <class T>
struct is_floating_point : false_type {};
#define EMULATOR_INTEGRAL(T) \
  template <>                \
  struct is_integral<T> : true_type {};
EMULATOR_INTEGRAL(bool)
EMULATOR_INTEGRAL(char)
EMULATOR_INTEGRAL(signed char)
EMULATOR_INTEGRAL(uchar)
EMULATOR_INTEGRAL(short)
EMULATOR_INTEGRAL(ushort)
EMULATOR_INTEGRAL(int)
EMULATOR_INTEGRAL(uint)
EMULATOR_INTEGRAL(long)
EMULATOR_INTEGRAL(ulong)
#undef EMULATOR_INTEGRAL
template <>
struct is_floating_point<float> : true_type {};
template <>
struct is_floating_point<half> : true_type {};
template <>
struct is_floating_point<bfloat> : true_type {};
template <class T>
constexpr bool is_integral_v = is_integral<remove_cv_t<T>>::value;
template <class T>
constexpr bool is_floating_point_v = is_floating_point<remove_cv_t<T>>::value;
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T>
constexpr bool is_unsigned_v = is_integral_v<T> && T(-1) > T(0);
template <class T>
constexpr bool is_signed_v = is_arithmetic_v<T> && !is_unsigned_v<T>;

template <class T>
struct numeric_limits {  // of the integers
  static constexpr bool is_specialized = true, is_integer = true, is_signed = T(-1) < T(0);
  static constexpr int digits = int(sizeof(T)) * 8 - (is_signed ? 1 : 0);
  static constexpr T max() { return is_signed ? T((T(1) << (digits - 1)) - 1 + (T(1) << (digits - 1))) : T(~T(0)); }
  static constexpr T lowest() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T min() { return lowest(); }
};
#define EMULATOR_LIMITS(T, DIGITS, MAX, MIN, EPSILON)                                  \
  template <>                                                                          \
  struct numeric_limits<T> {                                                           \
    static constexpr bool is_specialized = true, is_integer = false, is_signed = true; \
    static constexpr int digits = DIGITS;                                              \
    static constexpr T max() { return T(MAX); }                                        \
    static constexpr T lowest() { return T(-MAX); }                                    \
    static constexpr T min() { return T(MIN); }                                        \
    static constexpr T epsilon() { return T(EPSILON); }                                \
    static constexpr T infinity() { return T(INFINITY); }                              \
    static constexpr T quiet_NaN() { return T(NAN); }                                  \
    static constexpr T signaling_NaN() { return T(NAN); }                              \
  };
EMULATOR_LIMITS(float, 24, FLT_MAX, FLT_MIN, FLT_EPSILON)
EMULATOR_LIMITS(half, 11, 65504.0f, 6.103515625e-5f, 9.765625e-4f)
EMULATOR_LIMITS(bfloat, 8, 3.38953138925153547590470800371487866880e+38f, FLT_MIN, 0.0078125f)
#undef EMULATOR_LIMITS

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal

using metal::as_type;
