// The functions that an instrumented shader calls: at every access to memory (-fsanitize=thread), and for a wrong index
// or address (-fsanitize=bounds,alignment). They replace the sanitizers' runtime.
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

// The handlers' first arguments, as both compilers lay them out.
struct Place {
  const char* file;
  std::uint32_t line, column;
};
struct TypeName {
  std::uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  Place place;
  const TypeName* type;
  std::uint8_t log_alignment, kind;
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
  const auto& at = *static_cast<const Place*>(error);
  if (emulator::Machine* machine = emulator::Machine::current()) {
    machine->violation("out of bounds: index " + std::to_string(reinterpret_cast<std::intptr_t>(index)) +
                       " of an array at " + at.file + ":" + std::to_string(at.line) + ".");
  }
}

void __ubsan_handle_type_mismatch_v1(void* error, void* address) {
  const auto& mismatch = *static_cast<const TypeMismatch*>(error);
  if (emulator::Machine* machine = emulator::Machine::current()) {
    const std::size_t alignment = std::size_t{1} << mismatch.log_alignment;
    machine->report_misaligned(reinterpret_cast<std::uintptr_t>(address), alignment, mismatch.type->name,
                               std::string(" at ") + mismatch.place.file + ":" + std::to_string(mismatch.place.line));
  }
}

}  // extern "C"
#pragma GCC visibility pop
