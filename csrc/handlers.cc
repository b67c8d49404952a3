// Two ways to launch one kernel, which check alike what they are given: an XLA custom call, and a C function for a host
// callback, on platforms where no library's custom call knows what work comes before it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr std::int64_t most_threads = 1024;
constexpr std::size_t most_parameter_bytes = 4096;  // Metal copies no more into a command

// Checks and fills what both callers give alike, and launches. Returns what is wrong, in a sentence.
std::optional<std::string> launch_checked(jflash::Launch& launch, const std::int32_t* grid, const std::int32_t* threads,
                                          const std::uint8_t* parameters, std::size_t parameter_bytes) {
  std::int64_t in_group = 1;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (grid[axis] < 0 || threads[axis] < 1)
      return "jflash_metal_launch: `grid` must not be negative and `threads` must be positive.";
    launch.grid[axis] = static_cast<std::uint32_t>(grid[axis]);
    launch.threads[axis] = static_cast<std::uint32_t>(threads[axis]);
    in_group *= threads[axis];
    if (in_group > most_threads) return "jflash_metal_launch: `threads` must multiply to at most 1024.";
  }
  if (parameter_bytes > most_parameter_bytes) return "jflash_metal_launch: `parameters` must have at most 4096 bytes.";
  launch.parameters = parameters;
  launch.parameter_bytes = parameter_bytes;
  return jflash::launch(launch);
}

jflash::Buffer buffer(void* data, ffi::DataType type, std::size_t bytes) {
  const std::size_t element = ffi::ByteWidth(type);
  return {data, bytes, element == 0 ? 1 : element};
}

// The custom call "jflash_metal_launch". Attributes: source and entry (strings), grid and threads (int32[3]), parameters
// (uint8[]). Every operand and result is a buffer of the kernel, in order.
ffi::Error run(ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view source, std::string_view entry,
               ffi::Span<const std::int32_t> grid, ffi::Span<const std::int32_t> threads,
               ffi::Span<const std::uint8_t> parameters) {
  if (grid.size() != 3 || threads.size() != 3)
    return ffi::Error::InvalidArgument("jflash_metal_launch: `grid` and `threads` must have three entries each.");
  jflash::Launch launch;
  launch.source = source;
  launch.entry = entry;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return operand.error();
    launch.operands.push_back(buffer(operand->untyped_data(), operand->element_type(), operand->size_bytes()));
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    launch.results.push_back(buffer((*result)->untyped_data(), (*result)->element_type(), (*result)->size_bytes()));
  }
  const auto failure = launch_checked(launch, grid.begin(), threads.begin(), parameters.begin(), parameters.size());
  return failure.has_value() ? ffi::Error::Internal(*failure) : ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jflash_metal_launch, run,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("source")
                                  .Attr<std::string_view>("entry")
                                  .Attr<ffi::Span<const std::int32_t>>("grid")
                                  .Attr<ffi::Span<const std::int32_t>>("threads")
                                  .Attr<ffi::Span<const std::uint8_t>>("parameters"));

// One launch outside of XLA; `grid` and `threads` have three entries each, `buffers` has the operands and then the results.
// Returns the bytes of what went wrong, a sentence of which `message` gets as many as it has room for; 0: nothing.
extern "C" std::size_t jflash_metal_run(const char* source, const char* entry, const std::int32_t* grid,
                                        const std::int32_t* threads, const std::uint8_t* parameters,
                                        std::size_t parameter_bytes, const jflash::Buffer* buffers, std::size_t operands,
                                        std::size_t results, char* message, std::size_t room) {
  jflash::Launch launch;
  launch.source = source;
  launch.entry = entry;
  launch.operands.assign(buffers, buffers + operands);
  launch.results.assign(buffers + operands, buffers + operands + results);
  const auto failure = launch_checked(launch, grid, threads, parameters, parameter_bytes);
  if (!failure.has_value()) return 0;
  std::memcpy(message, failure->data(), std::min(room, failure->size()));
  return failure->size();
}

// "metal" or "emulator".
extern "C" const char* jflash_metal_host() { return jflash::host(); }

#pragma GCC visibility pop
