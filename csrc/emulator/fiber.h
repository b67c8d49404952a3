// A stack of its own for every thread of a threadgroup, and the switch between two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace emulator {

// Memory for one stack, above guard pages. Movable, not copyable.
class Stack {
 public:
  static constexpr std::size_t bytes = 256 * 1024;
  // A whole number of pages on every system. No step of the compiled shader is larger.
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

// Gives faults on this OS thread a stack of their own, as a fiber whose stack overflows cannot handle one.
class FaultStack {
 public:
  // `handler` takes the address, and returns if the fault is not the emulator's. One handler serves the process.
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
