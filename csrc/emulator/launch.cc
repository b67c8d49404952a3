// launch() without an Apple GPU: the shader runs on the CPU, under every check.
#include "../launch.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <exception>

#include "compile.h"
#include "lines.h"
#include "machine.h"

namespace emulator {

namespace {

std::atomic<std::uint64_t> seed{0};

// Memory for all buffers of a launch, each surrounded by unused addresses.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Arena() { munmap(memory_, bytes_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* at(std::size_t offset) const { return static_cast<char*>(memory_) + offset; }

 private:
  std::size_t bytes_;
  void* memory_;
};

std::size_t gap_after(std::size_t bytes) { return (bytes + (std::size_t{1} << 20) + 4095) / 4096 * 4096; }

std::optional<std::string> run(const jflash::Launch& launch) {
  const LoadedShader& shader = load_shader(launch.source);
  const Entry* entry = shader.find(launch.entry);
  const std::string title = "Metal emulator, kernel " + std::string(launch.entry) + ": ";
  if (entry == nullptr) return title + "the shader has no kernel of this name.";

  std::vector<jflash::Buffer> buffers = launch.operands;
  buffers.insert(buffers.end(), launch.results.begin(), launch.results.end());
  const std::size_t first_result = launch.operands.size();
  if (launch.parameter_bytes > 0) buffers.push_back({const_cast<void*>(launch.parameters), launch.parameter_bytes, 1});
  if (buffers.size() > most_buffers)
    return title + std::to_string(buffers.size()) + " buffers; a kernel can have " + std::to_string(most_buffers) + ".";

  std::size_t total = 1 << 20;
  for (const auto& buffer : buffers) total += buffer.bytes + gap_after(buffer.bytes);
  const Arena arena(total);
  std::vector<Region> regions;
  std::vector<void*> bindings;
  std::vector<std::pair<std::size_t, std::size_t>> outputs;  // each result's number and its region's number
  std::size_t offset = 1 << 20;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto& buffer = buffers[i];
    const bool result = i >= first_result && i < first_result + launch.results.size();
    // A result that aliases an operand makes that operand writable.
    std::size_t alias = first_result;
    for (std::size_t operand = 0; result && operand < first_result; ++operand)
      if (buffer.bytes > 0 && buffers[operand].data == buffer.data) alias = operand;
    if (result && alias < first_result) {
      Region& region = regions[alias];
      region.shadow = std::make_unique<Shadow>(buffer.bytes, buffer.element_bytes, false);
      region.shadow->initialise();
      bindings.push_back(region.begin);
      outputs.push_back({i, alias});
      continue;
    }
    char* memory = arena.at(offset);
    offset += (buffer.bytes + gap_after(buffer.bytes) + 63) / 64 * 64;
    if (result) {
      std::memset(memory, 0xff, buffer.bytes);
      outputs.push_back({i, regions.size()});
    } else if (buffer.bytes > 0) {
      std::memcpy(memory, buffer.data, buffer.bytes);
    }
    bindings.push_back(memory);
    regions.push_back({"buffer(" + std::to_string(i) + ")", memory, buffer.bytes, i,
                       result ? std::make_unique<Shadow>(buffer.bytes, buffer.element_bytes, false) : nullptr});
  }

  Machine machine(title, std::move(regions),
                  {shader.begin, shader.end, [&shader](std::uintptr_t offset) { return line_of(shader.path, offset); }},
                  seed.load());
  std::optional<std::string> violation = machine.run(*entry, launch.grid, launch.threads, bindings);
  for (const auto& [number, region_number] : outputs) {
    const Region& region = machine.regions()[region_number];
    const auto unwritten = region.shadow->unwritten();
    if (!violation && unwritten.count > 0) {
      violation = title + "unwritten result: " + std::to_string(unwritten.count) + " of the " +
                  std::to_string(region.bytes) + " bytes of " + region.name +
                  " were never written, the first at byte " + std::to_string(unwritten.first) + ".";
    }
    if (region.bytes > 0) std::memcpy(buffers[number].data, region.begin, region.bytes);
  }
  record(std::move(machine.counters()));
  return violation;
}

}  // namespace

}  // namespace emulator

namespace jflash {

std::optional<std::string> launch(const Launch& launch) {
  try {
    return emulator::run(launch);
  } catch (const std::exception& error) {
    return "Metal emulator, kernel " + std::string(launch.entry) + ": " + error.what();
  }
}

const char* host() { return "emulator"; }

}  // namespace jflash

#pragma GCC visibility push(default)

// `directory` is where compiled shaders are kept; called once, before the first launch.
extern "C" void metal_emulator_set_cache_directory(const char* directory) { emulator::set_cache_directory(directory); }

// The command of the clang that checks address spaces, its words separated by '|'; called once, before the first
// launch.
extern "C" void metal_emulator_set_clang(const char* command) { emulator::set_clang(command); }

// `seed` determines the order of threads and threadgroups, and the random layout of matrices.
extern "C" void metal_emulator_set_seed(std::uint64_t seed) { emulator::seed = seed; }

#pragma GCC visibility pop
