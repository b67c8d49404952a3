// Scalar types.
#pragma once

#include "scalars.h"

// The upper half of a float, rounded to nearest, ties to even. The language has no implicit conversion from a number.
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

#include "traits.h"

namespace metal {

using ::bfloat;
using ::half;

template <class T>
using remove_addrspace_t = T;

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal

using metal::as_type;
