// Shadow memory: the last write and the last read of each byte, and whether a barrier lies between two accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

enum class Access : std::uint8_t { read, write, atomic_load, atomic_store, atomic };

constexpr bool reads(Access access) { return access != Access::write && access != Access::atomic_store; }
constexpr bool writes(Access access) { return access != Access::read && access != Access::atomic_load; }
constexpr bool atomic(Access access) { return access >= Access::atomic_load; }

// The threads that a stamp stands for. A collective load or store is made by an unknown lane of the SIMD-group.
enum class AccessScope : std::uint16_t { lane, simdgroup, threadgroup, grid };

// One access: its thread, its place in the code, and the number of earlier barriers that order this kind of memory.
struct Stamp {
  static constexpr std::uint32_t none = 0, host = ~0u;

  std::uint32_t group = none;       // 1 + the threadgroup's number
  std::uint32_t place = 0;          // the instruction's in the compiled shader
  std::uint32_t barriers = 0;       // the threadgroup's
  std::uint16_t simd_barriers = 0;  // the SIMD-group's, since the threadgroup's last
  std::uint16_t thread : 10 = 0;
  AccessScope scope : 2 = AccessScope::lane;
  std::uint16_t atomic : 1 = 0;
};

enum class Verdict { fine, uninitialised, race_with_write, race_with_read };

struct Finding {
  Verdict verdict = Verdict::fine;
  std::size_t offset = 0;
  Stamp other = {};
};

class Shadow {
 public:
  // `element_bytes` (a power of two) is the size of most accesses; smaller ones refine the shadow when they occur.
  // `private_to_group`: every threadgroup has its own memory, so accesses of other threadgroups do not count.
  Shadow(std::size_t bytes, std::size_t element_bytes, bool private_to_group);

  // Marks all bytes as written before the launch.
  void initialise();

  // Checks an access that lies inside, and records it if it is allowed.
  Finding record(std::size_t offset, std::size_t bytes, Access access, const Stamp& me);

  // The first byte that was never written and the number of them; {bytes, 0} if there is none.
  struct Unwritten {
    std::size_t first, count;
  };
  Unwritten unwritten() const;

 private:
  struct Cell {
    Stamp write, read;
  };

  void refine(unsigned shift);
  bool expired(const Stamp& earlier, const Stamp& me) const {
    return earlier.group == Stamp::none || (private_to_group_ && earlier.group != me.group);
  }
  bool ordered(const Stamp& earlier, const Stamp& me) const;
  Verdict record(Cell& cell, Access access, const Stamp& me) const;

  std::size_t bytes_;
  unsigned shift_;
  bool private_to_group_;
  std::vector<Cell> cells_;
};

}  // namespace emulator
