// The kernels of a shader: their definitions, their instantiations, and how the emulator calls them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tokens.h"

namespace emulator {

class Kernels : protected Source {
 protected:
  explicit Kernels(std::string_view preprocessed) : Source(preprocessed) {}

  bool is_kernel(std::size_t i) const;
  // i: `kernel`, or the `void` after [[kernel]]. Records the parameters, which a template's instantiations share.
  void definition(std::size_t i);
  // template [[host_name("f_32")]] [[kernel]] void f<float, 32>(...);  or  ... decltype(f<float, 32>) f<float, 32>;
  void explicit_instantiation(std::size_t i);
  std::string entries() const;

  bool apple_matrix_layout_ = false;

 private:
  struct Parameter {
    std::string type;       // without name, attribute and address space
    std::string attribute;  // "buffer", "thread_position_in_grid", ...
    std::string argument;   // "3" of buffer(3)
    std::string condition;  // the function constant that says whether the buffer is bound; "": it always is
    bool pointer = false, reference = false;
  };

  struct Kernel {
    std::string name, expression;
  };

  // Whether [[kernel]] precedes `void`, possibly with other attributes between them.
  bool pending_kernel_attribute(std::size_t i) const;
  // Buffers without a number take the free numbers in order.
  static void number_buffers(std::vector<Parameter>& parameters);
  bool template_header_precedes(std::size_t i) const;
  Parameter parameter(std::size_t begin, std::size_t end, const std::string& kernel) const;

  std::map<std::string, std::vector<Parameter>> parameters_;
  std::vector<Kernel> kernels_;
};

}  // namespace emulator
