// Finds the line of the shader that an instruction of the compiled shader comes from.
#pragma once

#include <cstdint>
#include <string>

namespace emulator {

// Returns "file:line" of the instruction at `offset` from where the shared object `path` is loaded, or "" if its debug
// information does not say. Reads DWARF version 4, as `-gdwarf-4` makes it.
std::string line_of(const std::string& path, std::uint64_t offset);

}  // namespace emulator
