// From Metal to C++20: rewrites, token by token, the constructs that the headers in include/ cannot define.
#pragma once

#include <string>
#include <string_view>

#include "tokens.h"

namespace emulator {

// Blanks the inclusion of Metal's own headers, so that a preprocessor leaves nothing but the shader.
std::string without_metal_headers(std::string_view source);

// For running: includes "metal_stdlib" and ends with the table of kernels, `metal_emulator_entries`.
// For clang's check of address spaces: includes "address_spaces.h", which keeps them.
enum class Purpose { run, check_address_spaces };

// `preprocessed` is the preprocessor's output, with its line markers. Throws TranslationError.
std::string translate(std::string_view preprocessed, Purpose purpose);

}  // namespace emulator
