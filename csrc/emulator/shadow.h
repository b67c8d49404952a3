// Who last wrote and who last read each byte of a memory, and whether a barrier lies between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

enum class Access : std::uint8_t { read, write, atomic_load, atomic_store, atomic };

constexpr bool reads(Access access) { return access != Access::write && access != Access::atomic_store; }
constexpr bool writes(Access access) { return access != Access::read && access != Access::atomic_load; }
constexpr bool atomic(Access access) { return access >= Access::atomic_load; }

// How many threads one stamp stands for. A collective load or store is made by some lane, nobody may know which.
enum class Who : std::uint16_t { lane, simdgroup, threadgroup, grid };

// One access: by whom, where in the code, and after how many barriers that order this kind of memory.
struct Stamp {
  static constexpr std::uint32_t nobody = 0, host = ~0u;

  std::uint32_t group = nobody;     // 1 + the threadgroup's number
  std::uint32_t place = 0;          // of the instruction in the compiled shader
  std::uint32_t barriers = 0;       // of the threadgroup
  std::uint16_t simd_barriers = 0;  // of the SIMD-group, since the threadgroup's last
  std::uint16_t thread : 10 = 0;
  Who who : 2 = Who::lane;
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
  // `element_bytes` (a power of two) is the size of most accesses: smaller ones make the shadow finer when they come.
  // `private_to_group`: every threadgroup has its own memory, so what others did to it is forgotten.
  Shadow(std::size_t bytes, std::size_t element_bytes, bool private_to_group);

  // All bytes count as written before the launch.
  void initialise();

  // Checks an access that lies inside, and remembers it if it is fine.
  Finding touch(std::size_t offset, std::size_t bytes, Access access, const Stamp& me);

  // The first byte that nobody ever wrote and how many there are; {bytes, 0} if there is none.
  struct Unwritten {
    std::size_t first, count;
  };
  Unwritten unwritten() const;

 private:
  struct Cell {
    Stamp write, read;
  };

  void refine(unsigned shift);
  bool forgotten(const Stamp& earlier, const Stamp& me) const {
    return earlier.group == Stamp::nobody || (private_to_group_ && earlier.group != me.group);
  }
  bool ordered(const Stamp& earlier, const Stamp& me) const;
  Verdict touch(Cell& cell, Access access, const Stamp& me) const;

  std::size_t bytes_;
  unsigned shift_;
  bool private_to_group_;
  std::vector<Cell> cells_;
};

}  // namespace emulator
