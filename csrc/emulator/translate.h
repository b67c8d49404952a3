// From Metal to C++20: what the C++ headers in include/ cannot give a meaning to is rewritten, token by token.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace emulator {

struct TranslationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Blanks the inclusion of Metal's own headers, so that a preprocessor leaves nothing but the shader.
std::string without_metal_headers(std::string_view source);

// `preprocessed` is a shader behind the preprocessor, with its line markers. The result includes "metal_stdlib" and ends with
// the table of the shader's kernels, `metal_emulator_entries`. Throws TranslationError.
std::string translate(std::string_view preprocessed);

}  // namespace emulator
