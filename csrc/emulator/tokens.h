// The tokens of a preprocessed shader: identifiers, numbers, punctuation and line markers.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace emulator {

struct TranslationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Token {
  enum Kind { identifier, number, other, marker } kind;
  std::string space;  // what stands before it
  std::string text;
};

using Tokens = std::vector<Token>;

// Concatenated, space and text in turn, the tokens give the source.
Tokens tokenize(std::string_view source);

// A source as numbered tokens, with queries about them.
class Source {
 protected:
  explicit Source(std::string_view preprocessed) : tokens_(tokenize(preprocessed)) {}

  // "" past the end.
  const std::string& text(std::size_t i) const {
    static const std::string none;
    return i < tokens_.size() ? tokens_[i].text : none;
  }

  // Line markers stay.
  void erase(std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < std::min(end, tokens_.size()); ++i)
      if (tokens_[i].kind != Token::marker) tokens_[i].text.clear();
  }

  // One past the token that closes the bracket at `open`.
  std::size_t closing(std::size_t open) const {
    int depth = 0;
    for (std::size_t i = open; i < tokens_.size(); ++i) {
      if (text(i) == "(" || text(i) == "[" || text(i) == "{") ++depth;
      if ((text(i) == ")" || text(i) == "]" || text(i) == "}") && --depth == 0) return i + 1;
    }
    throw TranslationError("The shader ends inside a bracket.");
  }

  bool is_attribute(std::size_t i) const {
    return text(i) == "[" && text(i + 1) == "[" && tokens_[i + 1].space.empty();
  }
  std::size_t attribute_end(std::size_t i) const { return closing(i); }

  std::string joined(std::size_t begin, std::size_t end) const {
    std::string out;
    for (std::size_t i = begin; i < end; ++i)
      if (tokens_[i].kind != Token::marker) out += (out.empty() ? "" : " ") + tokens_[i].text;
    return out;
  }

  bool has(std::size_t begin, std::size_t end, const char* word) const {
    for (std::size_t i = begin; i < end; ++i)
      if (text(i) == word) return true;
    return false;
  }

  Tokens tokens_;
};

}  // namespace emulator
