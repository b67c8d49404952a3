// One launch: its threadgroups one after the other, their threads as fibers of one OS thread, every rule checked.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "counters.h"
#include "fiber.h"
#include "include/runtime.h"
#include "shadow.h"

namespace emulator {

constexpr unsigned simd_width = 32;
constexpr unsigned most_threads = 1024;
constexpr std::size_t threadgroup_memory_limit = 32 * 1024;
constexpr std::size_t threadgroup_address_space = 4 * 1024 * 1024;

// More accesses, by a thread that does not wait meanwhile (seconds) or by a threadgroup (minutes), count as an endless
// loop.
constexpr std::uint64_t most_accesses_of_thread = std::uint64_t{1} << 28;
constexpr std::uint64_t most_accesses_of_threadgroup = std::uint64_t{1} << 32;

// The two kinds of memory that a barrier orders.
constexpr int threadgroup_space = 0, device_space = 1;

// A buffer as the shader sees it: a copy of the caller's memory, with unmapped addresses on both sides.
struct Region {
  std::string name;
  char* begin;
  std::size_t bytes;
  std::size_t counter;             // index into Counters::buffers
  std::unique_ptr<Shadow> shadow;  // none: read only
};

// The code and constants of the compiled shader.
struct Module {
  std::uintptr_t begin, end;
  std::function<std::string(std::uintptr_t)> place;  // an offset from `begin` as "file:line", or ""
};

// The barrier or collective operation at which threads wait; all of them must come to the same one.
struct Site {
  const char* name;
  const char* file;
  int line;

  bool operator==(const Site& other) const;
  std::string text() const;
};

// A lane's part in a collective operation.
struct LaneOperands {
  const void* in;
  void* out;
  const void* second;  // the address of a load or store, or the second factor
  const void* third;   // the summand
  unsigned argument;
};

class Machine {
 public:
  Machine(std::string title, std::vector<Region> regions, Module module, std::uint64_t seed);

  // Runs all threadgroups. Returns in words the first rule that was broken, if any.
  std::optional<std::string> run(const Entry& entry, const std::array<std::uint32_t, 3>& grid,
                                 const std::array<std::uint32_t, 3>& threads, std::vector<void*> buffers);

  // The machine whose fiber runs now on this OS thread, or null.
  static Machine* current() { return running; }

  // The functions from here on are called from fibers.
  // One lane's access; `instruction` is its address in the shader.
  void access(std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t instruction) {
    check_access(address, bytes, access, static_cast<std::uint32_t>(instruction - module_.begin), AccessScope::lane);
  }
  // An access by an operation of the library. In a collective one some lane of the SIMD-group makes it.
  void access(std::uintptr_t address, std::size_t bytes, Access access, const Site& site, AccessScope scope) {
    check_access(address, bytes, access, site_number(site), scope);
  }
  void threadgroup_barrier(unsigned flags, const Site& site);
  void simdgroup_barrier(unsigned flags, const Site& site);
  void* threadgroup_variable(int id, const char* name, std::size_t bytes, std::size_t alignment);
  // `complete` runs once, in the last lane to arrive, with the operands of all lanes of the SIMD-group.
  template <class Complete>
  void collective(const Site& site, const LaneOperands& operands, Complete complete);
  unsigned lane() const { return running_ % simd_width; }
  const std::array<std::uint8_t, 64>& matrix_layout() const { return matrix_layout_; }
  Counters& counters() { return counters_; }
  [[noreturn]] void report_misaligned(std::uintptr_t address, std::size_t alignment, const char* type,
                                      const std::string& where);
  [[noreturn]] void violation(const std::string& what);
  std::vector<Region>& regions() { return regions_; }

 private:
  enum class State : std::uint8_t { runnable, waiting, done };

  struct Thread {
    void* context;
    State state;
    Site waits_at;
    Arguments arguments;
  };

  struct Rendezvous {  // the meeting of a threadgroup or a SIMD-group
    unsigned members = 0, arrived = 0;
    Site site = {};
  };

  struct Simdgroup {
    Rendezvous rendezvous;
    std::uint32_t runnable = 0;  // a bit for each lane
    std::array<std::uint16_t, 2> barriers = {};
    std::array<LaneOperands, simd_width> operands = {};
  };

  struct Variable {
    int id;
    std::string name;
    std::size_t offset, bytes;
    Shadow shadow;
  };

  // Every memory access of a shader reads it, hence the fast model. It needs static TLS space, which a process has that
  // loads this library once.
  static thread_local constinit Machine* running __attribute__((tls_model("initial-exec")));

  static void fiber_main();
  static void on_fault(std::uintptr_t address);
  static bool in_stack(std::uintptr_t address, unsigned thread);
  void run_threadgroup();
  std::string deadlock() const;
  bool arrive(Rendezvous& rendezvous, const Site& site);
  void wait();
  void wake(Simdgroup& simdgroup);
  void check_access(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place, AccessScope scope);
  Stamp stamp(int space, std::uint32_t place, AccessScope scope) const;
  void check_shadow(Shadow& shadow, int space, const std::string& name, std::size_t offset, std::size_t bytes,
                    Access access, std::uint32_t place, AccessScope scope);
  [[noreturn]] void report_endless_loop(std::uint32_t place);
  [[noreturn]] void report_out_of_bounds(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place);
  std::string describe(std::uintptr_t address) const;
  std::string thread_name(unsigned thread) const;
  std::string position(const unsigned* position) const;
  std::uint32_t site_number(const Site& site);
  std::string at(std::uint32_t place) const;
  std::uint32_t random();
  void draw_matrix_layout();
  void take_apple_matrix_layout();

  std::string title_;
  std::vector<Region> regions_;
  std::size_t recent_ = 0;  // the region of the last access
  Module module_;
  std::vector<Site> sites_;
  std::uint64_t random_state_;
  Counters counters_;
  std::optional<std::string> violation_;

  const Entry* entry_ = nullptr;
  std::array<std::uint32_t, 3> grid_ = {};
  std::uint32_t group_ = 0;  // 1 + the running threadgroup's number
  unsigned running_ = 0;     // the running thread
  std::uintptr_t stack_ = 0;
  bool overflowed_ = false;         // the running thread's stack
  std::uint64_t accesses_ = 0;      // of this threadgroup
  std::uint64_t access_limit_ = 0;  // the number of accesses that counts as an endless loop
  void* scheduler_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Simdgroup> simdgroups_;
  Rendezvous rendezvous_;
  std::array<std::uint32_t, 2> barriers_ = {};
  std::vector<Variable> variables_;
  std::size_t variables_end_ = 0;
  std::unique_ptr<char[]> threadgroup_memory_;
  std::array<std::uint8_t, 64> matrix_layout_ = {};
};

template <class Complete>
void Machine::collective(const Site& site, const LaneOperands& operands, Complete complete) {
  Simdgroup& simdgroup = simdgroups_[running_ / simd_width];
  simdgroup.operands[lane()] = operands;
  if (arrive(simdgroup.rendezvous, site)) {
    complete(simdgroup.operands.data(), simdgroup.rendezvous.members);
    wake(simdgroup);
  } else {
    wait();
  }
}

}  // namespace emulator
