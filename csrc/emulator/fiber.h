// A stack of its own for every thread of a threadgroup, and the switch between two of them.
#pragma once

#include <cstddef>

namespace emulator {

// Memory for one stack, with a page below it that faults. Movable, not copyable.
class Stack {
 public:
  static constexpr std::size_t bytes = 256 * 1024;

  Stack();  // throws std::bad_alloc
  ~Stack();
  Stack(Stack&& other) noexcept;
  Stack& operator=(Stack&&) = delete;

  char* begin() const { return memory_; }

  // The context in which `main` starts on this stack; `main` must never return.
  void* start(void (*main)()) const;

 private:
  char* memory_;
};

}  // namespace emulator

// Saves the running context in *from and continues `to`, which start() or an earlier switch made.
extern "C" void metal_emulator_switch(void** from, void* to);
