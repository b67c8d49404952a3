#include "fiber.h"

#include <signal.h>
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

// Only the registers that a called function must keep are saved. The floating-point modes are the same in all fibers.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl metal_emulator_switch
.type metal_emulator_switch, @function
metal_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size metal_emulator_switch, .-metal_emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl metal_emulator_switch
.type metal_emulator_switch, %function
metal_emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size metal_emulator_switch, .-metal_emulator_switch
)");
#else
#error "The Metal emulator runs on x86-64 and 64-bit ARM."
#endif

namespace emulator {

namespace {

constexpr std::size_t fault_stack_bytes = 64 * 1024;

void (*fault_handler)(std::uintptr_t);
struct sigaction before;

void on_fault(int signal, siginfo_t* information, void* context) {
  fault_handler(reinterpret_cast<std::uintptr_t>(information->si_addr));
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, information, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  sigaction(SIGSEGV, &before, nullptr);  // the fault comes again, and ends the process
}

}  // namespace

Stack::Stack() {
  void* mapped =
      mmap(nullptr, guard_bytes + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mprotect(mapped, guard_bytes, PROT_NONE);
  memory_ = static_cast<char*>(mapped) + guard_bytes;
}

Stack::~Stack() {
  if (memory_ != nullptr) munmap(memory_ - guard_bytes, guard_bytes + bytes);
}

Stack::Stack(Stack&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}

FaultStack::FaultStack(void (*handler)(std::uintptr_t)) {
  static const bool once = [handler] {
    fault_handler = handler;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    // The handler may switch to another stack and never return, so no signal may stay blocked.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &before) == 0;
  }();
  stack_t present;
  sigaltstack(nullptr, &present);
  if (!once || (present.ss_flags & SS_DISABLE) == 0) return;  // another handler's stack serves as well
  memory_ = std::make_unique<char[]>(fault_stack_bytes);
  stack_t own = {};
  own.ss_sp = memory_.get();
  own.ss_size = fault_stack_bytes;
  sigaltstack(&own, nullptr);
}

FaultStack::~FaultStack() {
  if (memory_ == nullptr) return;
  stack_t none = {};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
}

void* Stack::start(void (*main)()) const {
  auto* top = reinterpret_cast<void**>(memory_ + bytes - 64);
#if defined(__x86_64__)
  // The stack holds, from the top: a return address that is never used, which also gives `main` the alignment of a
  // called function; `main`, to which the switch returns; six registers.
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
#else
  top -= 20;
  std::memset(top, 0, 20 * sizeof(void*));
  top[11] = reinterpret_cast<void*>(main);  // x30, the link register
  return top;
#endif
}

}  // namespace emulator
