// The element types of a shader, one element at a time, as float32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "include/runtime.h"

namespace emulator {

inline std::size_t size_of(Type type) {
  constexpr std::size_t sizes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4};
  return sizes[static_cast<int>(type)];
}

inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(float(fraction) * 0x1p-24f));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Rounds to nearest, ties to even, as the hardware does.
inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // below the smallest normal half: let the adder round at 2^-24
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class T>
T read_as(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

// This serves the floating-point types only.
inline float read_float(Type type, const void* address) {
  if (type == Type::float32) return read_as<float>(address);
  const auto bits = read_as<std::uint16_t>(address);
  return type == Type::float16 ? half_to_float(bits) : std::bit_cast<float>(std::uint32_t(bits) << 16);
}

inline void write_float(Type type, void* address, float value) {
  if (type == Type::float32) {
    std::memcpy(address, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = type == Type::float16 ? float_to_half(value) : float_to_bfloat(value);
  std::memcpy(address, &bits, sizeof bits);
}

}  // namespace emulator
