// A stack of its own for every thread of a threadgroup, and the switch between two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace emulator {

// Memory for one stack, with some below it that faults. Movable, not copyable.
class Stack {
 public:
  static constexpr std::size_t bytes = 256 * 1024;
  // A whole number of pages on every system; the compiled shader steps over no more of it at once.
  static constexpr std::size_t guard_bytes = 64 * 1024;

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

// While it lives, a fault on this OS thread gets a stack of its own, which a fiber that has run out of its has not.
class FaultStack {
 public:
  // `handler` takes the address. Where it returns, the fault is none of the emulator's. One handler for the process.
  explicit FaultStack(void (*handler)(std::uintptr_t));
  ~FaultStack();
  FaultStack(const FaultStack&) = delete;
  FaultStack& operator=(const FaultStack&) = delete;

 private:
  std::unique_ptr<char[]> memory_;
};

}  // namespace emulator

// Saves the running context in *from and continues `to`, which start() or an earlier switch made.
extern "C" void metal_emulator_switch(void** from, void* to);
