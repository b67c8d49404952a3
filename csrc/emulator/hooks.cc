// What -fsanitize=thread and -fsanitize=bounds make a shader call at every memory access; no sanitizer library is used.
#include <cstdint>
#include <string>

#include "machine.h"

namespace {

using emulator::Access;

// Null while a module's own initialisers run.
inline void access(const void* address, std::size_t bytes, Access access, void* instruction) {
  if (emulator::Machine* machine = emulator::Machine::current()) {
    machine->access(reinterpret_cast<std::uintptr_t>(address), bytes, access,
                    reinterpret_cast<std::uintptr_t>(instruction) - 1);
  }
}

// The parts of the handlers' first argument that are read here, laid out as both compilers do.
struct BoundsError {
  const char* file;
  std::uint32_t line;
};

}  // namespace

#define HERE __builtin_return_address(0)
#define HOOKS(bytes)                                                                                          \
  void __tsan_read##bytes(void* address) { access(address, bytes, Access::read, HERE); }                      \
  void __tsan_write##bytes(void* address) { access(address, bytes, Access::write, HERE); }                    \
  void __tsan_unaligned_read##bytes(void* address) { access(address, bytes, Access::read, HERE); }            \
  void __tsan_unaligned_write##bytes(void* address) { access(address, bytes, Access::write, HERE); }          \
  void __tsan_volatile_read##bytes(void* address) { access(address, bytes, Access::read, HERE); }             \
  void __tsan_volatile_write##bytes(void* address) { access(address, bytes, Access::write, HERE); }           \
  void __tsan_unaligned_volatile_read##bytes(void* address) { access(address, bytes, Access::read, HERE); }   \
  void __tsan_unaligned_volatile_write##bytes(void* address) { access(address, bytes, Access::write, HERE); } \
  void __tsan_read_write##bytes(void* address) {                                                              \
    access(address, bytes, Access::read, HERE);                                                               \
    access(address, bytes, Access::write, HERE);                                                              \
  }                                                                                                           \
  void __tsan_unaligned_read_write##bytes(void* address) {                                                    \
    access(address, bytes, Access::read, HERE);                                                               \
    access(address, bytes, Access::write, HERE);                                                              \
  }

#pragma GCC visibility push(default)
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* address, std::size_t bytes) { access(address, bytes, Access::read, HERE); }
void __tsan_write_range(void* address, std::size_t bytes) { access(address, bytes, Access::write, HERE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, Access::read, HERE);
  access(to, bytes, Access::write, HERE);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, Access::read, HERE);
  access(to, bytes, Access::write, HERE);
  return __builtin_memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  access(to, bytes, Access::write, HERE);
  return __builtin_memset(to, value, bytes);
}

void __ubsan_handle_out_of_bounds(void* error, void* index) {
  const auto& at = *static_cast<const BoundsError*>(error);
  if (emulator::Machine* machine = emulator::Machine::current()) {
    machine->violation("out of bounds: index " + std::to_string(reinterpret_cast<std::intptr_t>(index)) +
                       " of an array at " + at.file + ":" + std::to_string(at.line) + ".");
  }
}
void __ubsan_handle_out_of_bounds_abort(void* error, void* index) { __ubsan_handle_out_of_bounds(error, index); }

}  // extern "C"
#pragma GCC visibility pop
