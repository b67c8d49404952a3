// From Metal to C++20: what the C++ headers in include/ cannot give a meaning to is rewritten, token by token.
#pragma once

#include <string>
#include <string_view>

#include "tokens.h"

namespace emulator {

// Blanks the inclusion of Metal's own headers, so that a preprocessor leaves nothing but the shader.
std::string without_metal_headers(std::string_view source);

// For running: includes "metal_stdlib", ends with the table of the shader's kernels, `metal_emulator_entries`.
// For clang's look at address spaces: includes "address_spaces.h", which keeps them.
enum class Purpose { run, check_address_spaces };

// `preprocessed` is a shader behind the preprocessor, with its line markers. Throws TranslationError.
std::string translate(std::string_view preprocessed, Purpose purpose);

}  // namespace emulator
