#include "counters.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

namespace emulator {

namespace {

constexpr std::size_t remembered = 256;
std::mutex mutex;
std::deque<Counters> last;

std::string json(const Counters& counters) {
  std::string text = "{\"entry\": \"" + counters.entry + "\"";
  const auto add = [&text](const char* name, std::uint64_t value) {
    text += std::string(", \"") + name + "\": " + std::to_string(value);
  };
  add("threadgroups", counters.threadgroups);
  for (const bool written : {false, true}) {
    text += written ? ", \"bytes_written\": [" : ", \"bytes_read\": [";
    for (std::size_t i = 0; i < counters.buffers.size(); ++i) {
      const BufferTraffic& traffic = counters.buffers[i];
      text += (i == 0 ? "" : ", ") + std::to_string(written ? traffic.bytes_written : traffic.bytes_read);
    }
    text += "]";
  }
  add("threadgroup_bytes_read", counters.threadgroup_bytes_read);
  add("threadgroup_bytes_written", counters.threadgroup_bytes_written);
  add("threadgroup_memory", counters.threadgroup_memory);
  add("matrix_multiplications", counters.matrix_multiplications);
  add("exponentials", counters.exponentials);
  add("logarithms", counters.logarithms);
  add("threadgroup_barriers", counters.threadgroup_barriers);
  add("simdgroup_barriers", counters.simdgroup_barriers);
  add("collectives", counters.collectives);
  add("atomics", counters.atomics);
  return text + "}";
}

}  // namespace

void record(Counters counters) {
  const std::lock_guard lock(mutex);
  last.push_back(std::move(counters));
  if (last.size() > remembered) last.pop_front();
}

}  // namespace emulator

#pragma GCC visibility push(default)

// Writes the counters of the last launches, oldest first, as a JSON list and a final zero, if `capacity` suffices.
// Returns the number of bytes needed.
extern "C" std::size_t metal_emulator_counters(char* out, std::size_t capacity) {
  const std::lock_guard lock(emulator::mutex);
  std::string text = "[";
  for (const auto& counters : emulator::last) text += (text.size() > 1 ? ", " : "") + emulator::json(counters);
  text += "]";
  if (text.size() < capacity) std::memcpy(out, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

extern "C" void metal_emulator_forget_counters() {
  const std::lock_guard lock(emulator::mutex);
  emulator::last.clear();
}

#pragma GCC visibility pop
