// The one thing that differs between hosts: running a kernel of a Metal shader over buffers in the CPU's memory.
//
// Implemented by metal.mm (an Apple GPU) and by emulator/launch.cc (any CPU).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jflash {

// A piece of the caller's memory.
struct Buffer {
  void* data;
  std::size_t bytes;
  std::size_t element_bytes;  // the size of one element: 1, 2, 4 or 8
};

// One dispatch. Operands are bound at buffer(0..n-1), results at buffer(n..n+m-1), the parameters at buffer(n+m).
struct Launch {
  std::string_view source;               // one self-contained Metal translation unit
  std::string_view entry;                // the kernel's name
  std::array<std::uint32_t, 3> grid;     // threadgroups
  std::array<std::uint32_t, 3> threads;  // threads in a threadgroup
  std::vector<Buffer> operands;          // read only
  std::vector<Buffer> results;           // an alias of an operand starts with that operand's contents
  const void* parameters;                // bound as constant memory
  std::size_t parameter_bytes;           // 0: nothing is bound
};

// Runs the kernel to its end. May be called from several threads at once.
// Returns nothing on success, else what went wrong, in sentences for the user.
std::optional<std::string> launch(const Launch& launch);

// "metal" or "emulator".
const char* host();

}  // namespace jflash
