// Type traits and limits, in C++ with address spaces or without.
#pragma once

namespace metal {

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

}  // namespace metal
