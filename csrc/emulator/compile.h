// From the text of a shader to its code, loaded into this process; kept in a folder between processes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "include/runtime.h"

namespace emulator {

struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LoadedShader {
  const Entry* entries;       // up to one whose name is null
  std::uintptr_t begin, end;  // of its code and constants
  std::string path;           // of the shared object

  const Entry* find(std::string_view name) const;
};

// Where compiled shaders are kept. Must be called before the first load.
void set_cache_directory(std::string directory);

// With which clang to look at address spaces, its words parted by '|'; without one nobody looks. Before the first load.
void set_clang(const std::string& command);

// Translates, compiles and loads at first use, and returns what is loaded after that; from any thread.
// Throws CompileError or TranslationError.
const LoadedShader& load_shader(std::string_view source);

}  // namespace emulator
