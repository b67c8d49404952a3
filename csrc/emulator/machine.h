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

// So many accesses, by a thread that waits for nobody meanwhile or by a threadgroup, are taken for a loop without end:
// seconds and minutes.
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

// What barrier or collective operation threads meet at; all must come to the same one.
struct Site {
  const char* name;
  const char* file;
  int line;

  bool operator==(const Site& other) const;
  std::string text() const;
};

// What a lane brings to a collective operation.
struct Offer {
  const void* in;
  void* out;
  const void* more;
  const void* last;
  unsigned argument;
};

class Machine {
 public:
  Machine(std::string title, std::vector<Region> regions, Module module, std::uint64_t seed);

  // Runs all threadgroups; the result says which rule was broken, if any.
  std::optional<std::string> run(const Entry& entry, const std::array<std::uint32_t, 3>& grid,
                                 const std::array<std::uint32_t, 3>& threads, std::vector<void*> buffers);

  // The machine whose fiber runs now on this OS thread, or null.
  static Machine* current() { return running; }

  // Called from fibers.
  // One lane's access. `instruction` is where in the shader.
  void access(std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t instruction) {
    touch(address, bytes, access, static_cast<std::uint32_t>(instruction - module_.begin), Who::lane);
  }
  // An access of an operation of the library; of a collective one it is by some lane of the SIMD-group.
  void access(std::uintptr_t address, std::size_t bytes, Access access, const Site& site, Who who) {
    touch(address, bytes, access, number(site), who);
  }
  void threadgroup_barrier(unsigned flags, const Site& site);
  void simdgroup_barrier(unsigned flags, const Site& site);
  void* threadgroup_variable(int id, const char* name, std::size_t bytes, std::size_t alignment);
  // `complete` runs once, in the last lane to come, with what each lane of the SIMD-group offers.
  template <class Complete>
  void collective(const Site& site, const Offer& offer, Complete complete);
  unsigned lane() const { return running_ % simd_width; }
  const std::array<std::uint8_t, 64>& matrix_layout() const { return matrix_layout_; }
  Counters& counters() { return counters_; }
  [[noreturn]] void misaligned(std::uintptr_t address, std::size_t alignment, const char* type,
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

  struct Meeting {  // of a threadgroup or a SIMD-group
    unsigned members = 0, arrived = 0;
    Site site = {};
  };

  struct Simdgroup {
    Meeting meeting;
    std::uint32_t runnable = 0;  // a bit for each lane
    std::array<std::uint16_t, 2> barriers = {};
    std::array<Offer, simd_width> offers = {};
  };

  struct Variable {
    int id;
    std::string name;
    std::size_t offset, bytes;
    Shadow shadow;
  };

  // Looked at before every memory access of a shader, hence the fast model: this library is loaded once, by a process
  // that has room for it.
  static thread_local constinit Machine* running __attribute__((tls_model("initial-exec")));

  static void fiber_main();
  static void on_fault(std::uintptr_t address);
  static bool in_stack(std::uintptr_t address, unsigned thread);
  void run_threadgroup();
  std::string deadlock() const;
  bool arrive(Meeting& meeting, const Site& site);
  void wait();
  void wake(Simdgroup& simdgroup);
  void touch(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place, Who who);
  Stamp stamp(int space, std::uint32_t place, Who who) const;
  void check(Shadow& shadow, int space, const std::string& name, std::size_t offset, std::size_t bytes, Access access,
             std::uint32_t place, Who who);
  [[noreturn]] void endless(std::uint32_t place);
  [[noreturn]] void outside(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place);
  std::string describe(std::uintptr_t address) const;
  std::string thread_name(unsigned thread) const;
  std::string position(const unsigned* position) const;
  std::uint32_t number(const Site& site);
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
  bool overflowed_ = false;     // the running thread's stack
  std::uint64_t accesses_ = 0;  // of this threadgroup
  std::uint64_t patience_ = 0;  // the number of accesses at which somebody loops for ever
  void* scheduler_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Simdgroup> simdgroups_;
  Meeting meeting_;
  std::array<std::uint32_t, 2> barriers_ = {};
  std::vector<Variable> variables_;
  std::size_t variables_end_ = 0;
  std::unique_ptr<char[]> threadgroup_memory_;
  std::array<std::uint8_t, 64> matrix_layout_ = {};
};

template <class Complete>
void Machine::collective(const Site& site, const Offer& offer, Complete complete) {
  Simdgroup& simdgroup = simdgroups_[running_ / simd_width];
  simdgroup.offers[lane()] = offer;
  if (arrive(simdgroup.meeting, site)) {
    complete(simdgroup.offers.data(), simdgroup.meeting.members);
    wake(simdgroup);
  } else {
    wait();
  }
}

}  // namespace emulator
