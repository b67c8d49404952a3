// A shader behind the preprocessor as a list of words, numbers, signs and line markers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace emulator {

struct Token {
  enum Kind { identifier, number, other, marker } kind;
  std::string space;  // what stands before it
  std::string text;
};

using Tokens = std::vector<Token>;

// Joined again, space and text in turn, the tokens are the source.
Tokens tokenize(std::string_view source);

}  // namespace emulator
