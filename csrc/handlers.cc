// The XLA custom call "jflash_metal_launch": checks what it is given, binds it, and launches one kernel.
//
// Attributes: source and entry (strings), grid and threads (int32[3]), parameters (uint8[]). Every operand and result
// is a buffer of the kernel, in order.
#include <cstdint>
#include <string>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr std::int64_t most_threads = 1024;
constexpr std::size_t most_parameter_bytes = 4096;  // Metal copies no more into a command

ffi::Error invalid(const std::string& text) { return ffi::Error::InvalidArgument("jflash_metal_launch: " + text); }

jflash::Buffer buffer(void* data, ffi::DataType type, std::size_t bytes) {
  const std::size_t element = ffi::ByteWidth(type);
  return {data, bytes, element == 0 ? 1 : element};
}

ffi::Error run(ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view source, std::string_view entry,
               ffi::Span<const std::int32_t> grid, ffi::Span<const std::int32_t> threads,
               ffi::Span<const std::uint8_t> parameters) {
  jflash::Launch launch;
  launch.source = source;
  launch.entry = entry;
  if (grid.size() != 3 || threads.size() != 3) return invalid("`grid` and `threads` must have three entries each.");
  std::int64_t in_group = 1;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (grid[axis] < 0 || threads[axis] < 1)
      return invalid("`grid` must not be negative and `threads` must be positive.");
    launch.grid[axis] = static_cast<std::uint32_t>(grid[axis]);
    launch.threads[axis] = static_cast<std::uint32_t>(threads[axis]);
    in_group *= threads[axis];
    if (in_group > most_threads) return invalid("`threads` must multiply to at most 1024.");
  }
  if (parameters.size() > most_parameter_bytes) return invalid("`parameters` must have at most 4096 bytes.");
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
  launch.parameters = parameters.begin();
  launch.parameter_bytes = parameters.size();
  const auto failure = jflash::launch(launch);
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

// "metal" or "emulator".
extern "C" const char* jflash_metal_host() { return jflash::host(); }

#pragma GCC visibility pop
