// Compiles the text of a shader, loads its code into this process, and caches it in a folder.
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
  std::uintptr_t begin, end;  // the range of its code and constants
  std::string path;           // the path of the shared object

  const Entry* find(std::string_view name) const;
};

// Where compiled shaders are kept. Must be called before the first load.
void set_cache_directory(std::string directory);

// The command of the clang that checks address spaces, its words separated by '|'; empty: no check. Must be called
// before the first load.
void set_clang(const std::string& command);

// Translates, compiles and loads a shader at its first use. May be called from any thread.
// Throws CompileError or TranslationError.
const LoadedShader& load_shader(std::string_view source);

}  // namespace emulator
