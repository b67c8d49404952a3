// Counts of what one launch did, for want of hardware that could time it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct BufferTraffic {
  std::uint64_t bytes_read = 0, bytes_written = 0;
};

struct Counters {
  std::string entry;
  std::uint64_t threadgroups = 0;
  std::vector<BufferTraffic> buffers;  // in the order of their binding; the parameters last
  std::uint64_t threadgroup_bytes_read = 0, threadgroup_bytes_written = 0;
  std::uint64_t threadgroup_memory = 0;                            // bytes that one threadgroup holds
  std::uint64_t matrix_multiplications = 0;                        // 8x8 by 8x8, each by one SIMD-group
  std::uint64_t exponentials = 0;                                  // exp, exp2, exp10, tanh, pow; by lane
  std::uint64_t logarithms = 0;                                    // log, log2, log10; by lane
  std::uint64_t threadgroup_barriers = 0, simdgroup_barriers = 0;  // by group, not by thread
  std::uint64_t collectives = 0;                                   // reductions, shuffles and votes; by SIMD-group
  std::uint64_t atomics = 0;
};

// Keeps the counters of the last launches of this process, for metal_emulator_counters.
void record(Counters counters);

}  // namespace emulator
