#include "kernels.h"

#include <set>

namespace emulator {

bool Kernels::is_kernel(std::size_t i) const {
  if (tokens_[i].kind != Token::identifier) return false;
  if (text(i) == "kernel") return true;
  return text(i) == "void" && pending_kernel_attribute(i);
}

bool Kernels::pending_kernel_attribute(std::size_t i) const {
  while (i >= 4 && text(i - 1) == "]" && text(i - 2) == "]") {
    std::size_t open = i - 2;
    while (open > 0 && !is_attribute(open)) --open;
    if (has(open, i, "kernel")) return true;
    i = open;
  }
  return false;
}

void Kernels::definition(std::size_t i) {
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

void Kernels::number_buffers(std::vector<Parameter>& parameters) {
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

bool Kernels::template_header_precedes(std::size_t i) const {
  while (i > 0) {
    const std::string& before = text(i - 1);
    if (before == ";" || before == "}" || before == "{") return false;
    if (before == "template") return true;
    --i;
  }
  return false;
}

Kernels::Parameter Kernels::parameter(std::size_t begin, std::size_t end, const std::string& kernel) const {
  Parameter result;
  std::vector<std::size_t> words;
  for (std::size_t i = begin; i < end; ++i) {
    if (is_attribute(i)) {
      const std::size_t close = attribute_end(i);
      for (std::size_t at = i + 2; at + 2 < close;) {
        const std::size_t next = text(at + 1) == "(" ? closing(at + 1) : at + 1;
        const std::string argument = next > at + 1 ? joined(at + 2, next - 1) : "";
        if (text(at) == "function_constant") {
          result.condition = argument;
        } else {
          result.attribute = text(at);
          result.argument = argument;
        }
        at = next + 1;  // past the comma
      }
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
    if (t != "device" && t != "threadgroup" && t != "constant" && t != "thread" && t != "const") result.type += t + " ";
  }
  if (!result.attribute.empty()) return result;
  if (!result.pointer && !result.reference)
    throw TranslationError("A parameter of kernel " + kernel + " has no attribute: " + joined(begin, end));
  result.attribute = in_threadgroup ? "threadgroup" : "buffer";
  return result;
}

void Kernels::explicit_instantiation(std::size_t i) {
  std::size_t end = i;
  while (end < tokens_.size() && text(end) != ";") end = text(end) == "(" || text(end) == "[" ? closing(end) : end + 1;
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
  if (!is_kernel) return;
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

std::string Kernels::entries() const {
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
        out += std::string(p.reference ? "emulator::Reference" : "emulator::Pointer") + "{" +
               (p.condition.empty() ? "" : "!(" + p.condition + ") ? nullptr : ") + "emulator_arguments." +
               (p.attribute == "buffer" ? "buffers" : "threadgroup_buffers") + "[" + p.argument + "]}";
      } else {
        const std::string name = p.attribute == "thread_execution_width" ? "threads_per_simdgroup" : p.attribute;
        out += "emulator::position<" + p.type + ">(emulator_arguments." + name + ")";
      }
    }
    out += ");\n}\n";
    table += "    {\"" + kernel.name + "\", " + function + (apple_matrix_layout_ ? ", true},\n" : ", false},\n");
  }
  return out + "extern \"C\" const emulator::Entry metal_emulator_entries[] = {\n" + table +
         "    {nullptr, nullptr, false}};\n";
}

}  // namespace emulator
