// Collective operations of SIMD-groups and threadgroups, and atomics.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "include/runtime.h"
#include "machine.h"
#include "numbers.h"

using emulator::Access;
using emulator::AccessScope;
using emulator::Atomic;
using emulator::Collective;
using emulator::LaneOperands;
using emulator::Machine;
using emulator::Site;
using emulator::Type;

namespace {

template <class T>
T combine(Collective what, T a, T b) {
  switch (what) {
    case Collective::sum:
    case Collective::inclusive_sum:
    case Collective::exclusive_sum:
      return static_cast<T>(a + b);
    case Collective::product:
    case Collective::inclusive_product:
    case Collective::exclusive_product:
      return static_cast<T>(a * b);
    case Collective::minimum:
      if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
      return std::min(a, b);
    case Collective::maximum:
      if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
      return std::max(a, b);
    default:
      if constexpr (std::is_integral_v<T>) {
        if (what == Collective::bit_and) return static_cast<T>(a & b);
        if (what == Collective::bit_or) return static_cast<T>(a | b);
        return static_cast<T>(a ^ b);
      }
      return a;
  }
}

template <class T>
T load(Type type, const void* address) {
  if constexpr (std::is_same_v<T, float>) return emulator::read_float(type, address);
  return emulator::read_as<T>(address);
}

template <class T>
void store(Type type, void* address, T value) {
  if constexpr (std::is_same_v<T, float>) return emulator::write_float(type, address, value);
  std::memcpy(address, &value, sizeof value);
}

// Calls `body` with a value of the C++ type in which `type` is computed.
template <class Body>
void as_number(Type type, Body body) {
  switch (type) {
    case Type::boolean:
      return body(bool{});
    case Type::int8:
      return body(std::int8_t{});
    case Type::uint8:
      return body(std::uint8_t{});
    case Type::int16:
      return body(std::int16_t{});
    case Type::uint16:
      return body(std::uint16_t{});
    case Type::int32:
      return body(std::int32_t{});
    case Type::uint32:
      return body(std::uint32_t{});
    case Type::int64:
      return body(std::int64_t{});
    case Type::uint64:
      return body(std::uint64_t{});
    default:
      return body(float{});
  }
}

// Reduces one component over all lanes, or computes its prefixes. Lanes combine in the order of their number.
template <class T>
void reduce(Collective what, Type type, std::size_t at, LaneOperands* operands, unsigned lanes) {
  const bool inclusive = what == Collective::inclusive_sum || what == Collective::inclusive_product;
  const bool exclusive = what == Collective::exclusive_sum || what == Collective::exclusive_product;
  const auto in = [&](unsigned lane) { return load<T>(type, static_cast<const char*>(operands[lane].in) + at); };
  const auto out = [&](unsigned lane, T value) { store<T>(type, static_cast<char*>(operands[lane].out) + at, value); };
  T total = exclusive ? static_cast<T>(what == Collective::exclusive_sum ? 0 : 1) : in(0);
  if (inclusive) out(0, total);
  for (unsigned lane = exclusive ? 0 : 1; lane < lanes; ++lane) {
    const T mine = in(lane);
    if (exclusive) out(lane, total);
    total = combine(what, total, mine);
    if (inclusive) out(lane, total);
  }
  if (inclusive || exclusive) return;
  for (unsigned lane = 0; lane < lanes; ++lane) out(lane, total);
}

// The lane to read from: its own if the operation leaves a lane's data unchanged.
unsigned source_lane(Collective what, unsigned lane, unsigned argument, unsigned lanes) {
  switch (what) {
    case Collective::shuffle:
      return argument;
    case Collective::shuffle_xor:
      return lane ^ argument;
    case Collective::shuffle_up:
      return lane >= argument ? lane - argument : lane;
    case Collective::shuffle_down:
      return lane + argument < lanes ? lane + argument : lane;
    case Collective::rotate_up:
      return (lane + lanes - argument % lanes) % lanes;
    case Collective::rotate_down:
      return (lane + argument) % lanes;
    default:
      return 0;
  }
}

}  // namespace

extern "C" void metal_emulator_threadgroup_barrier(unsigned flags, const char* file, int line) {
  Machine::current()->threadgroup_barrier(flags, {"threadgroup_barrier", file, line});
}

extern "C" void metal_emulator_simdgroup_barrier(unsigned flags, const char* file, int line) {
  Machine::current()->simdgroup_barrier(flags, {"simdgroup_barrier", file, line});
}

extern "C" void* metal_emulator_threadgroup_variable(int id, const char* name, unsigned long bytes,
                                                     unsigned long alignment) {
  return Machine::current()->threadgroup_variable(id, name, bytes, alignment);
}

extern "C" void metal_emulator_collective(Collective what, Type type, int count, const void* in, void* out,
                                          unsigned argument, const char* name, const char* file, int line) {
  Machine& machine = *Machine::current();
  machine.collective(
      {name, file, line}, {in, out, nullptr, nullptr, argument}, [&](LaneOperands* operands, unsigned lanes) {
        ++machine.counters().collectives;
        const std::size_t size = size_of(type), all = size * static_cast<std::size_t>(count);
        if (what == Collective::ballot) {
          std::uint64_t votes = 0;
          for (unsigned lane = 0; lane < lanes; ++lane)
            votes |= std::uint64_t{*static_cast<const bool*>(operands[lane].in)} << lane;
          for (unsigned lane = 0; lane < lanes; ++lane) std::memcpy(operands[lane].out, &votes, sizeof votes);
          return;
        }
        if (what < Collective::shuffle) {
          for (std::size_t at = 0; at < all; at += size)
            as_number(type, [&]<class T>(T) { reduce<T>(what, type, at, operands, lanes); });
          return;
        }
        for (unsigned lane = 0; lane < lanes; ++lane) {
          const unsigned distance = operands[lane].argument;
          const bool fill = what == Collective::fill_up || what == Collective::fill_down;
          if (fill) {  // the first or last lanes take the filling of the lanes at the other end
            const bool up = what == Collective::fill_up;
            const unsigned from = up ? (lane + lanes - distance) % lanes : (lane + distance) % lanes;
            const bool wraps = up ? lane < distance : lane + distance >= lanes;
            std::memcpy(operands[lane].out, static_cast<const char*>(operands[from].in) + (wraps ? all : 0), all);
            continue;
          }
          const unsigned from = source_lane(what, lane, distance, lanes);
          if (from >= lanes) {
            machine.violation(std::string(name) + " at " + file + ":" + std::to_string(line) + " reads from lane " +
                              std::to_string(from) + " of a SIMD-group of " + std::to_string(lanes) + ".");
          }
          std::memcpy(operands[lane].out, operands[from].in, all);
        }
      });
}

namespace {

void atomic_operation(Atomic what, Type type, void* address, const void* operand, void* before) {
  as_number(type, [&]<class T>(T) {
    const T old = load<T>(type, address);
    if (before != nullptr) store<T>(type, before, old);
    if (what == Atomic::load) return;
    const T mine = load<T>(type, operand);
    T result = mine;
    switch (what) {
      case Atomic::add:
        result = combine(Collective::sum, old, mine);
        break;
      case Atomic::subtract:
        result = static_cast<T>(old - mine);
        break;
      case Atomic::minimum:
        result = combine(Collective::minimum, old, mine);
        break;
      case Atomic::maximum:
        result = combine(Collective::maximum, old, mine);
        break;
      case Atomic::bit_and:
        result = combine(Collective::bit_and, old, mine);
        break;
      case Atomic::bit_or:
        result = combine(Collective::bit_or, old, mine);
        break;
      case Atomic::bit_xor:
        result = combine(Collective::bit_xor, old, mine);
        break;
      default:
        break;
    }
    store<T>(type, address, result);
  });
}

}  // namespace

extern "C" void metal_emulator_atomic(Atomic what, Type type, void* address, const void* operand, void* before,
                                      const char* file, int line) {
  Machine& machine = *Machine::current();
  ++machine.counters().atomics;
  const auto kind = what == Atomic::store  ? Access::atomic_store
                    : what == Atomic::load ? Access::atomic_load
                                           : Access::atomic;
  machine.access(reinterpret_cast<std::uintptr_t>(address), size_of(type), kind, Site{"atomic operation", file, line},
                 AccessScope::lane);
  atomic_operation(what, type, address, operand, before);
}

extern "C" bool metal_emulator_compare_exchange(Type type, void* address, void* expected, const void* desired,
                                                const char* file, int line) {
  Machine& machine = *Machine::current();
  ++machine.counters().atomics;
  const std::size_t size = size_of(type);
  machine.access(reinterpret_cast<std::uintptr_t>(address), size, Access::atomic, Site{"atomic operation", file, line},
                 AccessScope::lane);
  const bool equal = std::memcmp(address, expected, size) == 0;
  if (!equal) std::memcpy(expected, address, size);
  if (equal) std::memcpy(address, desired, size);
  return equal;
}
