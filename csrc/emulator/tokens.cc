#include "tokens.h"

#include <algorithm>
#include <cctype>

namespace emulator {

namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

}  // namespace

Tokens tokenize(std::string_view source) {
  Tokens tokens;
  std::size_t at = 0;
  bool line_start = true;
  while (at < source.size()) {
    const std::size_t space = at;
    while (at < source.size() && std::isspace(static_cast<unsigned char>(source[at])) != 0) {
      line_start |= source[at] == '\n';
      ++at;
    }
    Token token{Token::other, std::string(source.substr(space, at - space)), ""};
    const std::size_t begin = at;
    if (at == source.size()) {
      tokens.push_back(token);
      break;
    }
    const char c = source[at];
    if (c == '#' && line_start) {
      token.kind = Token::marker;
      at = std::min(source.find('\n', at), source.size());
    } else if (std::isdigit(static_cast<unsigned char>(c)) != 0 ||
               (c == '.' && at + 1 < source.size() && std::isdigit(static_cast<unsigned char>(source[at + 1])) != 0)) {
      token.kind = Token::number;
      const bool hexadecimal = source.substr(at, 2) == "0x" || source.substr(at, 2) == "0X";
      while (at < source.size() &&
             (is_word(source[at]) || source[at] == '.' || source[at] == '\'' ||
              ((source[at] == '+' || source[at] == '-') &&
               std::string_view(hexadecimal ? "pP" : "eE").find(source[at - 1]) != std::string_view::npos)))
        ++at;
    } else if (is_word(c)) {
      token.kind = Token::identifier;
      while (at < source.size() && is_word(source[at])) ++at;
    } else if (c == '"' || c == '\'') {
      for (++at; at < source.size() && source[at] != c; ++at)
        if (source[at] == '\\') ++at;
      ++at;
    } else if (source.substr(at, 2) == "::" || source.substr(at, 2) == "->" || source.substr(at, 2) == "==" ||
               source.substr(at, 2) == "<=" || source.substr(at, 2) == ">=" || source.substr(at, 2) == "!=") {
      at += 2;
    } else {
      ++at;
    }
    at = std::min(at, source.size());
    line_start = false;
    token.text = std::string(source.substr(begin, at - begin));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace emulator
