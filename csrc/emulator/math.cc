// A shader's elementary functions are the C library's. Those that hardware computes in a slow unit are counted.
#include <cmath>

#include "include/runtime.h"
#include "machine.h"

namespace {

float exponential(float value) {
  ++emulator::Machine::current()->counters().exponentials;
  return value;
}

float logarithm(float value) {
  ++emulator::Machine::current()->counters().logarithms;
  return value;
}

}  // namespace

extern "C" {

float metal_emulator_exp(float x) { return exponential(std::exp(x)); }
float metal_emulator_exp2(float x) { return exponential(std::exp2(x)); }
float metal_emulator_exp10(float x) { return exponential(static_cast<float>(std::pow(10.0, double(x)))); }
float metal_emulator_tanh(float x) { return exponential(std::tanh(x)); }
float metal_emulator_pow(float x, float y) { return exponential(std::pow(x, y)); }
float metal_emulator_log(float x) { return logarithm(std::log(x)); }
float metal_emulator_log2(float x) { return logarithm(std::log2(x)); }
float metal_emulator_log10(float x) { return logarithm(std::log10(x)); }
float metal_emulator_sin(float x) { return std::sin(x); }
float metal_emulator_cos(float x) { return std::cos(x); }
float metal_emulator_tan(float x) { return std::tan(x); }
float metal_emulator_sinh(float x) { return std::sinh(x); }
float metal_emulator_cosh(float x) { return std::cosh(x); }
float metal_emulator_asin(float x) { return std::asin(x); }
float metal_emulator_acos(float x) { return std::acos(x); }
float metal_emulator_atan(float x) { return std::atan(x); }
float metal_emulator_atan2(float y, float x) { return std::atan2(y, x); }
float metal_emulator_asinh(float x) { return std::asinh(x); }
float metal_emulator_acosh(float x) { return std::acosh(x); }
float metal_emulator_atanh(float x) { return std::atanh(x); }
float metal_emulator_fmod(float x, float y) { return std::fmod(x, y); }
float metal_emulator_fma(float x, float y, float z) { return std::fma(x, y, z); }

}  // extern "C"
