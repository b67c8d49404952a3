#include "translate.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "kernels.h"

namespace emulator {

namespace {

class Translator : Kernels {
 public:
  Translator(std::string_view preprocessed, Purpose purpose)
      : Kernels(preprocessed), checking_(purpose == Purpose::check_address_spaces) {}

  std::string run() {
    read_pragmas();
    read_function_constants();
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (is_attribute(i)) {
        i = attribute_end(i) - 1;
        continue;
      }
      if (text(i) == "template" && text(i + 1) != "<" && !checking_) explicit_instantiation(i);
      if (is_kernel(i)) definition(i);
      if (text(i) == "threadgroup") threadgroup_declaration(i);
      if (tokens_[i].kind == Token::number && !text(i).empty()) literal(tokens_[i]);
      if (text(i) == "." && !checking_) swizzle(i);
      if (text(i) == "struct" && !checking_) specialization(i);
      if (checking_) vector_from_parts(i);
      if (checking_) member_of_address_space(i);
      if (text(i) == "is_function_constant_defined" && text(i + 1) == "(") {
        tokens_[i].text = constants_by_name_[text(i + 2)] ? "true" : "false";
        erase(i + 1, i + 4);
      }
    }
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (is_attribute(i)) erase(i, attribute_end(i));
      if (tokens_[i].kind == Token::identifier) address_space(i);
    }
    std::string out = checking_ ? "#include \"address_spaces.h\"\n" : "#include \"metal_stdlib\"\n";
    for (const Token& token : tokens_) out += token.space + token.text;
    return checking_ ? out : out + entries();
  }

 private:
  void read_pragmas() {
    const std::string start = "#pragma METAL_EMULATOR ", constant = "function_constant(";
    for (const Token& token : tokens_) {
      if (token.kind != Token::marker || !token.text.starts_with(start)) continue;
      const std::string setting =
          token.text.substr(start.size(), token.text.find_last_not_of(" \r") + 1 - start.size());
      const std::size_t close = setting.find(')'), equals = setting.find('=');
      if (setting == "matrix_layout(apple)") {
        apple_matrix_layout_ = true;
      } else if (setting.starts_with(constant) && close < equals && equals != std::string::npos) {
        constants_[setting.substr(constant.size(), close - constant.size())] = setting.substr(equals + 1);
      } else if (setting != "no_address_spaces") {
        throw TranslationError("The emulator does not know `" + token.text + "`. It knows " + constant +
                               "0) = true, matrix_layout(apple) and no_address_spaces.");
      }
    }
  }

  // `constant T name [[function_constant(3)]];` gets the value that a pragma gives.
  void read_function_constants() {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (!is_attribute(i) || text(i + 2) != "function_constant" || tokens_[i + 4].kind != Token::number) continue;
      const std::string number = text(i + 4), name = text(i - 1);
      const std::size_t end = attribute_end(i);
      const auto value = constants_.find(number);
      constants_by_name_[name] = value != constants_.end();
      erase(i, end);
      tokens_[i].text = " = " + (value != constants_.end() ? value->second : "{}");
      if (value == constants_.end()) check_unused(name, i);
    }
  }

  // A function constant without a value may be used only if the shader also asks whether it is defined.
  void check_unused(const std::string& name, std::size_t declaration) const {
    bool used = false;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (i + 1 == declaration || text(i) != name) continue;
      if (i >= 2 && text(i - 2) == "is_function_constant_defined") return;
      used = true;
    }
    if (used)
      throw TranslationError("The function constant `" + name + "` is used and has no value. Give it one with: " +
                             "#pragma METAL_EMULATOR function_constant(N) = value");
  }

  // `threadgroup float a[8], b;` in a function declares one object for the whole threadgroup. Pointers are unchanged.
  void threadgroup_declaration(std::size_t i) {
    std::size_t before = i;
    while (before > 0 && (tokens_[before - 1].kind == Token::marker || text(before - 1).empty())) --before;
    if (before == 0) return;
    const char previous = text(before - 1).back();
    if (previous != '{' && previous != '}' && previous != ';') return;
    std::size_t end = i + 1;
    int angles = 0;
    std::vector<std::size_t> names;
    std::size_t last_word = 0;
    bool initialised = false;
    for (; end < tokens_.size() && text(end) != ";"; ++end) {
      const std::string& t = text(end);
      if (t == "<") ++angles;
      if (t == ">") --angles;
      if (angles > 0) continue;
      if (t == "*" || t == "&" || t == "(" || t == "{") return;
      initialised |= t == "=";
      if (tokens_[end].kind == Token::identifier) last_word = end;
      if (t == "[" || t == ",") {
        if (names.empty() || names.back() != last_word) names.push_back(last_word);
        if (t == "[") end = closing(end) - 1;
      }
    }
    if (names.empty() || names.back() != last_word) names.push_back(last_word);
    if (initialised) throw TranslationError("A threadgroup variable cannot be initialised: " + joined(i, end));
    tokens_[i].text = "typedef";
    std::string references;
    for (const std::size_t at : names) {
      const std::string name = text(at), type = "emulator_type_" + std::to_string(++variables_) + "_" + name;
      references += " auto& " + name + " = emulator::threadgroup_variable<" + type + ">(" + std::to_string(variables_) +
                    ", \"" + name + "\");";
      tokens_[at].text = type;
    }
    tokens_[end].text += references;
  }

  // A literal without a suffix is a float; h makes it half, bf bfloat.
  static void literal(Token& token) {
    std::string& t = token.text;
    const bool hexadecimal = t.size() > 1 && (t[1] == 'x' || t[1] == 'X');
    const bool floating =
        hexadecimal ? t.find_first_of("pP") != std::string::npos : t.find_first_of(".eE") != std::string::npos;
    const char last = t.back();
    if (t.size() > 2 && !hexadecimal && (t.ends_with("bf") || t.ends_with("BF"))) {
      t = "bfloat(" + t.substr(0, t.size() - 2) + "f)";
    } else if (last == 'h' || last == 'H') {
      t = "half(" + t.substr(0, t.size() - 1) + (floating ? "f)" : ".0f)");
    } else if (floating && last != 'f' && last != 'F') {
      t += "f";
    } else if (!floating && !hexadecimal && (last == 'f' || last == 'F')) {
      t.insert(t.size() - 1, ".0");
    }
  }

  void swizzle(std::size_t i) {
    static constexpr std::string_view letters = "xyzw";
    const std::string& name = text(i + 1);
    if (name.size() < 2 || name.size() > 4 || name.find_first_not_of(letters) != std::string::npos) return;
    if (text(i + 2) == "(") return;
    const std::string& next = text(i + 2);
    const bool compound = next.size() == 1 && std::string_view("+-*/").find(next[0]) != std::string_view::npos &&
                          text(i + 3) == "=" && tokens_[i + 3].space.empty();
    std::string call = next == "=" || compound ? "template swizzle_reference<" : "template swizzle<";
    for (const char letter : name) call += (call.back() == '<' ? "" : ", ") + std::to_string(letters.find(letter));
    tokens_[i + 1].text = call + ">()";
  }

  // `template <class T> struct element<device T*> {...};` beside that of `threadgroup T*`: without address spaces the
  // second repeats the first, so it is removed.
  void specialization(std::size_t i) {
    if (text(i + 2) != "<") {
      specializations_.erase(text(i + 1));  // another template of this name, in another namespace
      return;
    }
    std::size_t body = i + 2;
    for (int depth = 0; body < tokens_.size() && (depth > 0 || body == i + 2); ++body)
      depth += text(body) == "<" ? 1 : text(body) == ">" ? -1 : 0;
    const std::string arguments = without_address_spaces(i + 2, body);
    while (body < tokens_.size() && text(body) != "{" && text(body) != ";") ++body;
    if (text(body) != "{") return;
    const std::size_t end = closing(body);
    const std::string definition = without_address_spaces(body, end);
    const auto [before, is_new] = specializations_[text(i + 1)].emplace(arguments, definition);
    if (is_new) return;
    if (before->second != definition)
      throw TranslationError("`" + text(i + 1) +
                             "` means something else in each address space, and the compiled shader " +
                             "has only one: " + joined(i, end));
    while (i > 0 && text(i) != "template") --i;
    erase(i, end + 1);
  }

  std::string without_address_spaces(std::size_t begin, std::size_t end) const {
    std::string out;
    for (std::size_t i = begin; i < end; ++i) {
      const std::string& t = text(i);
      if (tokens_[i].kind == Token::marker || t == "device" || t == "threadgroup" || t == "thread") continue;
      out += (t == "constant" ? "const" : t) + " ";
    }
    return out;
  }

  void address_space(std::size_t i) {
    std::string& t = tokens_[i].text;
    if (checking_ && t == "device") t = "EMULATOR_DEVICE";
    if (checking_ && t == "threadgroup") t = "EMULATOR_THREADGROUP";
    if (t == "device" || t == "thread" || t == "threadgroup" || t == "kernel") t.clear();
    if (t != "constant") return;
    std::size_t before = i, after = i + 1;
    while (before > 0 && text(before - 1).empty()) --before;
    while (after < tokens_.size() && text(after).empty()) ++after;
    const std::string& previous = before > 0 ? text(before - 1) : text(tokens_.size());
    const bool is_constexpr = text(after) == "constexpr" || previous == "constexpr";
    t = is_constexpr || text(after) == "const" || previous == "const" ? "" : "const";
    if (checking_ && !is_constexpr) t += " EMULATOR_CONSTANT";
  }

  // float4(a, b, c, d) and `float4 v(a, b, c, d), w(v);`, which clang's own vectors do not support.
  void vector_from_parts(std::size_t i) {
    static const std::set<std::string> scalars = {"bool", "char", "uchar", "short", "ushort", "int",
                                                  "uint", "long", "ulong", "half",  "bfloat", "float"};
    const std::string type = text(i);
    if (type.size() < 2 || type.back() < '2' || type.back() > '4' ||
        scalars.count(type.substr(0, type.size() - 1)) == 0)
      return;
    if (text(i + 1) == "(" && text(i + 2) != "*" && text(i + 2) != "&")
      tokens_[i].text = "emulator::make<" + type + ">";
    for (std::size_t name = i + 1; is_variable_from_parts(name);) {
      tokens_[name].text += " = emulator::make<" + type + ">";
      const std::size_t end = closing(name + 1);
      if (text(end) == ";") break;
      name = end + 1;
    }
  }

  // Whether `i` is a variable initialised in parentheses. A function has a parameter's type and name side by side,
  // nothing between the parentheses, or a body after them.
  bool is_variable_from_parts(std::size_t i) const {
    if (i >= tokens_.size() || tokens_[i].kind != Token::identifier) return false;
    if (text(i + 1) != "(" || text(i + 2) == ")") return false;
    const std::size_t end = closing(i + 1);
    if (text(end) != ";" && text(end) != ",") return false;
    for (std::size_t at = i + 2; at + 1 < end; ++at)
      if (tokens_[at].kind == Token::identifier && tokens_[at + 1].kind == Token::identifier) return false;
    return true;
  }

  // `float sum(int n) const device {...}`, a member function of structs in device memory, becomes one with an explicit
  // object parameter, so clang checks its calls. The body is dropped, as it may use `this`.
  void member_of_address_space(std::size_t i) {
    static const std::map<std::string, std::string> spaces = {{"device", "EMULATOR_DEVICE"},
                                                              {"threadgroup", "EMULATOR_THREADGROUP"},
                                                              {"constant", "const EMULATOR_CONSTANT"}};
    const auto space = spaces.find(text(i));
    if (space == spaces.end() || i == 0) return;
    std::size_t close = i - 1, end = i + 1;
    while (close > 0 && text(close) == "const") --close;
    while (text(end) == "const") ++end;
    if (text(close) != ")" || (text(end) != "{" && text(end) != ";")) return;
    std::size_t open = close;
    for (int depth = 1; depth > 0;) {
      --open;
      depth += text(open) == ")" ? 1 : text(open) == "(" ? -1 : 0;
    }
    const std::string constness = has(close, end, "const") ? "const " : "";
    tokens_[open].text += "this " + constness + space->second + " auto& emulator_this" + (open + 1 < close ? ", " : "");
    erase(close + 1, text(end) == "{" ? closing(end) : end);
    tokens_[close].text += ";";
  }

  bool checking_;
  std::map<std::string, std::string> constants_;
  std::map<std::string, bool> constants_by_name_;
  std::map<std::string, std::map<std::string, std::string>> specializations_;  // by name and arguments
  int variables_ = 0;
};

}  // namespace

std::string without_metal_headers(std::string_view source) {
  std::string out;
  while (!source.empty()) {
    const std::size_t end = std::min(source.find('\n'), source.size() - 1) + 1;
    const std::string_view line = source.substr(0, end);
    const std::size_t start = line.find_first_not_of(" \t");
    const bool directive =
        start != std::string_view::npos && line[start] == '#' && line.find("include") != std::string_view::npos &&
        (line.find("<metal_") != std::string_view::npos || line.find("<simd/") != std::string_view::npos);
    if (directive)
      out += "\n";
    else
      out += line;
    source.remove_prefix(end);
  }
  return out;
}

std::string translate(std::string_view preprocessed, Purpose purpose) {
  return Translator(preprocessed, purpose).run();
}

}  // namespace emulator
