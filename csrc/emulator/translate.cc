#include "translate.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "tokens.h"

namespace emulator {

namespace {

struct Parameter {
  std::string type;       // without name, attribute and address space
  std::string attribute;  // "buffer", "thread_position_in_grid", ...
  std::string argument;   // "3" of buffer(3)
  bool pointer = false, reference = false;
};

struct Kernel {
  std::string name, expression;
};

class Translator {
 public:
  Translator(std::string_view preprocessed, Purpose purpose)
      : tokens_(tokenize(preprocessed)), checking_(purpose == Purpose::check_address_spaces) {}

  std::string run() {
    read_function_constants();
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (is_attribute(i)) {
        i = attribute_end(i) - 1;
        continue;
      }
      if (text(i) == "template" && text(i + 1) != "<") explicit_instantiation(i);
      if (is_kernel(i)) kernel_definition(i);
      if (text(i) == "threadgroup") threadgroup_declaration(i);
      if (tokens_[i].kind == Token::number) literal(tokens_[i]);
      if (text(i) == "." && !checking_) swizzle(i);
      if (checking_) vector_from_parts(i);
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
  const std::string& text(std::size_t i) const {
    static const std::string none;
    return i < tokens_.size() ? tokens_[i].text : none;
  }

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

  // `#pragma METAL_EMULATOR function_constant(3) = true`, and then the declarations `constant T name
  // [[function_constant(3)]];`.
  void read_function_constants() {
    for (const Token& token : tokens_) {
      const std::string start = "#pragma METAL_EMULATOR function_constant(";
      if (token.kind != Token::marker || token.text.rfind(start, 0) != 0) continue;
      const std::size_t close = token.text.find(')'), equals = token.text.find('=');
      if (close == std::string::npos || equals == std::string::npos)
        throw TranslationError("A function constant is given as: " + start + "0) = true");
      constants_[token.text.substr(start.size(), close - start.size())] = token.text.substr(equals + 1);
    }
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (!is_attribute(i) || text(i + 2) != "function_constant") continue;
      const std::string number = text(i + 4), name = text(i - 1);
      const std::size_t end = attribute_end(i);
      const auto value = constants_.find(number);
      constants_by_name_[name] = value != constants_.end();
      erase(i, end);
      tokens_[i].text = " = " + (value != constants_.end() ? value->second : "{}");
      if (value == constants_.end()) check_unused(name, i);
    }
  }

  // A function constant without a value may only be named where the shader also asks whether it has one.
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

  bool is_kernel(std::size_t i) const {
    if (tokens_[i].kind != Token::identifier) return false;
    if (text(i) == "kernel") return true;
    return text(i) == "void" && pending_kernel_attribute(i);
  }

  // [[kernel]] before `void`, perhaps with other attributes between.
  bool pending_kernel_attribute(std::size_t i) const {
    while (i >= 4 && text(i - 1) == "]" && text(i - 2) == "]") {
      std::size_t open = i - 2;
      while (open > 0 && !is_attribute(open)) --open;
      if (has(open, i, "kernel")) return true;
      i = open;
    }
    return false;
  }

  // i: `kernel`, or the `void` behind [[kernel]]. Notes its parameters; a template's are kept for its instantiations.
  void kernel_definition(std::size_t i) {
    std::size_t open = i;
    while (open < tokens_.size() && text(open) != "(") open = is_attribute(open) ? attribute_end(open) : open + 1;
    const std::string name = text(open - 1);
    const std::size_t end = closing(open);
    if (text(i) == "kernel") tokens_[i].text.clear();
    std::vector<Parameter> parameters;
    std::size_t begin = open + 1;
    int depth = 0;
    for (std::size_t at = open + 1; at < end; ++at) {
      const std::string& t = text(at);
      if (t == "(" || t == "[" || t == "<" || t == "{") ++depth;
      if (t == ">" || t == "]" || t == "}" || (t == ")" && at + 1 < end)) --depth;
      if ((t == "," && depth == 0) || at + 1 == end) {
        if (at > begin) parameters.push_back(parameter(begin, at, name));
        begin = at + 1;
      }
    }
    number_buffers(parameters);
    const bool is_template = template_header_precedes(i);
    const bool known = parameters_.count(name) != 0;
    parameters_[name] = std::move(parameters);
    if (!is_template && !known) kernels_.push_back({name, name});
  }

  // Buffers without a number take those that are left, in order.
  static void number_buffers(std::vector<Parameter>& parameters) {
    for (const char* kind : {"buffer", "threadgroup"}) {
      std::set<std::string> taken;
      for (const Parameter& p : parameters)
        if (p.attribute == kind) taken.insert(p.argument);
      int next = 0;
      for (Parameter& p : parameters) {
        if (p.attribute != kind || !p.argument.empty()) continue;
        while (taken.count(std::to_string(next)) != 0) ++next;
        p.argument = std::to_string(next++);
      }
    }
  }

  bool template_header_precedes(std::size_t i) const {
    while (i > 0) {
      const std::string& before = text(i - 1);
      if (before == ";" || before == "}" || before == "{" || tokens_[i - 1].kind == Token::marker) return false;
      if (before == "template") return true;
      --i;
    }
    return false;
  }

  Parameter parameter(std::size_t begin, std::size_t end, const std::string& kernel) const {
    Parameter result;
    std::vector<std::size_t> words;
    for (std::size_t i = begin; i < end; ++i) {
      if (is_attribute(i)) {
        result.attribute = text(i + 2);
        const std::size_t close = attribute_end(i);
        if (text(i + 3) == "(") result.argument = joined(i + 4, close - 3);
        i = close - 1;
      } else if (tokens_[i].kind != Token::marker) {
        words.push_back(i);
      }
    }
    if (words.size() < 2)
      throw TranslationError("A parameter of kernel " + kernel + " has no name: " + joined(begin, end));
    words.pop_back();  // its name
    bool in_threadgroup = false;
    for (const std::size_t i : words) {
      const std::string& t = text(i);
      result.pointer |= t == "*";
      result.reference |= t == "&";
      in_threadgroup |= t == "threadgroup";
      if (t != "device" && t != "threadgroup" && t != "constant" && t != "thread" && t != "const")
        result.type += t + " ";
    }
    if (!result.attribute.empty()) return result;
    if (!result.pointer && !result.reference)
      throw TranslationError("A parameter of kernel " + kernel + " has no attribute: " + joined(begin, end));
    result.attribute = in_threadgroup ? "threadgroup" : "buffer";
    return result;
  }

  // template [[host_name("f_32")]] [[kernel]] void f<float, 32>(...);  or  ... decltype(f<float, 32>) f<float, 32>;
  void explicit_instantiation(std::size_t i) {
    std::size_t end = i;
    while (end < tokens_.size() && text(end) != ";")
      end = text(end) == "(" || text(end) == "[" ? closing(end) : end + 1;
    std::size_t at = i + 1;
    Kernel kernel;
    bool is_kernel = false;
    while (is_attribute(at)) {
      const std::size_t close = attribute_end(at);
      for (std::size_t t = at; t < close; ++t) {
        is_kernel |= text(t) == "kernel";
        if (text(t) != "host_name") continue;
        for (std::size_t part = t + 2; text(part) != ")" && part < close; ++part)
          kernel.name += text(part).substr(1, text(part).size() - 2);
      }
      at = close;
    }
    is_kernel |= text(at) == "kernel";
    if (text(at) == "kernel") ++at;
    if (!is_kernel || checking_) return;
    at = text(at) == "decltype" ? closing(at + 1) : at + 1;  // the return type
    const std::size_t name = at;
    int depth = 0;
    while (at < end && (depth > 0 || text(at) != "(")) {
      if (text(at) == "<") ++depth;
      if (text(at) == ">") --depth;
      ++at;
    }
    kernel.expression = joined(name, at);
    if (kernel.name.empty()) kernel.name = kernel.expression;
    kernels_.push_back(kernel);
    erase(i, end + 1);
  }

  // `threadgroup float a[8], b;` inside a function: one object for the whole threadgroup. Pointers stay as they are.
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

  // float4(a, b, c, d), which clang's own vectors do not understand.
  void vector_from_parts(std::size_t i) {
    static const std::set<std::string> scalars = {"bool", "char", "uchar", "short", "ushort", "int",
                                                  "uint", "long", "ulong", "half",  "bfloat", "float"};
    std::string& t = tokens_[i].text;
    if (t.size() < 2 || t.back() < '2' || t.back() > '4' || scalars.count(t.substr(0, t.size() - 1)) == 0) return;
    if (text(i + 1) == "(" && text(i + 2) != "*" && text(i + 2) != "&") t = "emulator::make<" + t + ">";
  }

  std::string entries() const {
    std::string out = "\n", table;
    for (std::size_t k = 0; k < kernels_.size(); ++k) {
      const Kernel& kernel = kernels_[k];
      const std::string base = kernel.expression.substr(0, kernel.expression.find_first_of(" <"));
      const auto found = parameters_.find(base);
      if (found == parameters_.end()) throw TranslationError("Kernel " + kernel.name + " has no definition.");
      const std::string function = "emulator_entry_" + std::to_string(k);
      out +=
          "static void " + function + "(const emulator::Arguments& emulator_arguments) {\n  " + kernel.expression + "(";
      bool first = true;
      for (const Parameter& p : found->second) {
        out += first ? "" : ", ";
        first = false;
        if (p.attribute == "buffer" || p.attribute == "threadgroup") {
          out += std::string(p.reference ? "emulator::Reference" : "emulator::Pointer") + "{emulator_arguments." +
                 (p.attribute == "buffer" ? "buffers" : "threadgroup_buffers") + "[" + p.argument + "]}";
        } else {
          const std::string name = p.attribute == "thread_execution_width" ? "threads_per_simdgroup" : p.attribute;
          out += "emulator::position<" + p.type + ">(emulator_arguments." + name + ")";
        }
      }
      out += ");\n}\n";
      table += "    {\"" + kernel.name + "\", " + function + "},\n";
    }
    return out + "extern \"C\" const emulator::Entry metal_emulator_entries[] = {\n" + table +
           "    {nullptr, nullptr}};\n";
  }

  Tokens tokens_;
  bool checking_;
  std::map<std::string, std::string> constants_;
  std::map<std::string, bool> constants_by_name_;
  std::map<std::string, std::vector<Parameter>> parameters_;
  std::vector<Kernel> kernels_;
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
