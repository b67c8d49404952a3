// The 8x8 matrices of a SIMD-group: two elements in each lane, in the layout of the launch, random or Apple's.
#include <cstring>

#include "include/runtime.h"
#include "machine.h"
#include "numbers.h"

using emulator::Access;
using emulator::AccessScope;
using emulator::LaneOperands;
using emulator::Machine;
using emulator::Site;
using emulator::Type;

namespace {

struct Tile {
  float at[8][8];
};

void* element(Machine& machine, Type type, void* const* lanes, int index) {
  const unsigned where = machine.matrix_layout()[static_cast<unsigned>(index)];
  return static_cast<char*>(lanes[where / 2]) + where % 2 * size_of(type);
}

template <class Pick>
Tile gather(Machine& machine, Type type, LaneOperands* operands, Pick pick) {
  void* lanes[emulator::simd_width];
  for (unsigned i = 0; i < emulator::simd_width; ++i) lanes[i] = const_cast<void*>(pick(operands[i]));
  Tile tile;
  for (int i = 0; i < 64; ++i) tile.at[i / 8][i % 8] = read_float(type, element(machine, type, lanes, i));
  return tile;
}

void scatter(Machine& machine, Type type, LaneOperands* operands, const Tile& tile) {
  void* lanes[emulator::simd_width];
  for (unsigned i = 0; i < emulator::simd_width; ++i) lanes[i] = operands[i].out;
  for (int i = 0; i < 64; ++i) write_float(type, element(machine, type, lanes, i), tile.at[i / 8][i % 8]);
}

void require_full_simdgroup(Machine& machine, unsigned lanes, const char* name) {
  if (lanes != emulator::simd_width)
    machine.violation(std::string(name) + " in a SIMD-group of " + std::to_string(lanes) + " threads; it takes 32.");
}

void require_same_address(Machine& machine, LaneOperands* operands, const char* name, const char* file, int line) {
  for (unsigned i = 1; i < emulator::simd_width; ++i) {
    if (operands[i].second != operands[0].second || operands[i].argument != operands[0].argument)
      machine.violation(
          std::string("divergence: the lanes give ") + name + " at " + file + ":" + std::to_string(line) +
          " different addresses, " +
          std::to_string(static_cast<const char*>(operands[i].second) - static_cast<const char*>(operands[0].second)) +
          " bytes apart in lanes 0 and " + std::to_string(i) + ".");
  }
}

}  // namespace

extern "C" void metal_emulator_matrix_fill(Type type, void* elements, float diagonal, float elsewhere, const char* file,
                                           int line) {
  Machine& machine = *Machine::current();
  machine.collective({"make_filled_simdgroup_matrix", file, line}, {nullptr, elements, nullptr, nullptr, 0},
                     [&](LaneOperands* operands, unsigned lanes) {
                       require_full_simdgroup(machine, lanes, "make_filled_simdgroup_matrix");
                       Tile tile;
                       for (int i = 0; i < 64; ++i) tile.at[i / 8][i % 8] = i % 9 == 0 ? diagonal : elsewhere;
                       scatter(machine, type, operands, tile);
                     });
}

extern "C" void metal_emulator_matrix_load(Type type, void* elements, Type memory_type, const void* memory,
                                           unsigned long elements_per_row, unsigned long column, unsigned long row,
                                           bool transpose, const char* file, int line) {
  Machine& machine = *Machine::current();
  const std::size_t size = size_of(memory_type);
  const char* origin = static_cast<const char*>(memory) + (row * elements_per_row + column) * size;
  const Site site{"simdgroup_load", file, line};
  machine.collective(site, {nullptr, elements, origin, nullptr, static_cast<unsigned>(elements_per_row)},
                     [&](LaneOperands* operands, unsigned lanes) {
                       require_full_simdgroup(machine, lanes, "simdgroup_load");
                       require_same_address(machine, operands, "simdgroup_load", file, line);
                       Tile tile;
                       for (unsigned i = 0; i < 8; ++i) {
                         const char* from = origin + i * elements_per_row * size;
                         machine.access(reinterpret_cast<std::uintptr_t>(from), 8 * size, Access::read, site,
                                        AccessScope::simdgroup);
                         for (unsigned j = 0; j < 8; ++j)
                           (transpose ? tile.at[j][i] : tile.at[i][j]) = read_float(memory_type, from + j * size);
                       }
                       scatter(machine, type, operands, tile);
                     });
}

extern "C" void metal_emulator_matrix_store(Type type, const void* elements, Type memory_type, void* memory,
                                            unsigned long elements_per_row, unsigned long column, unsigned long row,
                                            bool transpose, const char* file, int line) {
  Machine& machine = *Machine::current();
  const std::size_t size = size_of(memory_type);
  char* origin = static_cast<char*>(memory) + (row * elements_per_row + column) * size;
  const Site site{"simdgroup_store", file, line};
  machine.collective(site, {elements, nullptr, origin, nullptr, static_cast<unsigned>(elements_per_row)},
                     [&](LaneOperands* operands, unsigned lanes) {
                       require_full_simdgroup(machine, lanes, "simdgroup_store");
                       require_same_address(machine, operands, "simdgroup_store", file, line);
                       const Tile tile = gather(machine, type, operands, [](const LaneOperands& o) { return o.in; });
                       for (unsigned i = 0; i < 8; ++i) {
                         char* to = origin + i * elements_per_row * size;
                         machine.access(reinterpret_cast<std::uintptr_t>(to), 8 * size, Access::write, site,
                                        AccessScope::simdgroup);
                         for (unsigned j = 0; j < 8; ++j)
                           write_float(memory_type, to + j * size, transpose ? tile.at[j][i] : tile.at[i][j]);
                       }
                     });
}

extern "C" void metal_emulator_matrix_multiply(Type d_type, void* d, Type a_type, const void* a, Type b_type,
                                               const void* b, Type c_type, const void* c, const char* file, int line) {
  Machine& machine = *Machine::current();
  machine.collective(
      {"simdgroup_multiply_accumulate", file, line}, {a, d, b, c, 0}, [&](LaneOperands* operands, unsigned lanes) {
        require_full_simdgroup(machine, lanes, "simdgroup_multiply_accumulate");
        ++machine.counters().matrix_multiplications;
        const Tile left = gather(machine, a_type, operands, [](const LaneOperands& o) { return o.in; });
        const Tile right = gather(machine, b_type, operands, [](const LaneOperands& o) { return o.second; });
        Tile sum = {};
        if (c != nullptr) sum = gather(machine, c_type, operands, [](const LaneOperands& o) { return o.third; });
        for (int i = 0; i < 8; ++i)
          for (int k = 0; k < 8; ++k)
            for (int j = 0; j < 8; ++j) sum.at[i][j] += left.at[i][k] * right.at[k][j];
        scatter(machine, d_type, operands, sum);
      });
}
