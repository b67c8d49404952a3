#include "lines.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

namespace emulator {

namespace {

// Reads little-endian numbers, and zeros past the end.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  bool done() const { return at_ >= data_.size(); }
  std::size_t at() const { return at_; }
  void seek(std::size_t at) { at_ = at; }

  template <class T>
  T number() {
    T value{};
    if (data_.size() - std::min(at_, data_.size()) >= sizeof value)
      std::memcpy(&value, data_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  // A number in DWARF's variable-length form.
  std::int64_t variable(bool is_signed) {
    std::uint64_t value = 0;
    unsigned shift = 0;
    std::uint8_t byte;
    do {
      byte = number<std::uint8_t>();
      if (shift < 64) value |= std::uint64_t{byte & 0x7fu} << shift;
      shift += 7;
    } while ((byte & 0x80) != 0);
    if (is_signed && (byte & 0x40) != 0 && shift < 64) value |= ~std::uint64_t{0} << shift;
    return static_cast<std::int64_t>(value);
  }

  std::string_view text() {
    const std::size_t begin = std::min(at_, data_.size());
    const std::size_t end = std::min(data_.find('\0', begin), data_.size());
    at_ = end + 1;
    return data_.substr(begin, end - begin);
  }

 private:
  std::string_view data_;
  std::size_t at_ = 0;
};

std::string_view section(std::string_view file, const char* wanted) {
  Elf64_Ehdr header;
  if (file.size() < sizeof header) return {};
  std::memcpy(&header, file.data(), sizeof header);
  const auto entry = [&](unsigned index) {
    Elf64_Shdr section{};
    const std::size_t at = header.e_shoff + std::size_t{index} * header.e_shentsize;
    if (at + sizeof section <= file.size()) std::memcpy(&section, file.data() + at, sizeof section);
    return section;
  };
  const Elf64_Shdr names = entry(header.e_shstrndx);
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr one = entry(i);
    Reader name(file);
    name.seek(names.sh_offset + one.sh_name);
    if (name.text() == wanted && one.sh_offset + one.sh_size <= file.size())
      return file.substr(one.sh_offset, one.sh_size);
  }
  return {};
}

struct Row {
  std::uint64_t address = 0, file = 1;
  std::int64_t line = 1;
};

// Runs one compilation unit's line program; sets `found` where it covers `address`.
void run(Reader& reader, std::size_t end, std::uint64_t address, std::string& found) {
  if (reader.number<std::uint16_t>() != 4) return reader.seek(end);
  const auto header_length = reader.number<std::uint32_t>();
  const std::size_t program = reader.at() + header_length;
  const auto least_instruction = reader.number<std::uint8_t>();
  reader.number<std::uint8_t>();  // operations of a very long instruction word
  reader.number<std::uint8_t>();  // is_statement at the start
  const auto line_base = reader.number<std::int8_t>();
  const auto line_range = reader.number<std::uint8_t>();
  const auto opcode_base = reader.number<std::uint8_t>();
  if (line_range == 0) return reader.seek(end);
  std::vector<std::uint8_t> operands(opcode_base);
  for (unsigned i = 1; i < opcode_base; ++i) operands[i] = reader.number<std::uint8_t>();
  while (!reader.text().empty()) {
  }
  // The shader's own files have no directory; the emulator's headers have one.
  std::vector<std::string_view> files = {""};
  for (std::string_view name = reader.text(); !name.empty(); name = reader.text()) {
    files.push_back(reader.variable(false) == 0 ? name : "");
    for (int i = 0; i < 2; ++i) reader.variable(false);
  }
  reader.seek(program);

  Row row, before;
  bool in_sequence = false;
  std::string shader_line;  // the last line of the shader before an inlined function of the emulator
  const auto emit = [&](bool last) {
    if (in_sequence && before.file < files.size() && !files[before.file].empty() && before.line > 0)
      shader_line = std::string(files[before.file]) + ":" + std::to_string(before.line);
    if (in_sequence && before.address <= address && address < row.address) found = shader_line;
    before = row;
    in_sequence = !last;
    if (last) row = {};
  };
  const auto advance = [&](std::uint64_t operations) { row.address += operations * least_instruction; };
  while (reader.at() < end && !reader.done()) {
    const unsigned opcode = reader.number<std::uint8_t>();
    if (opcode >= opcode_base) {
      const unsigned adjusted = opcode - opcode_base;
      advance(adjusted / line_range);
      row.line += line_base + static_cast<int>(adjusted % line_range);
      emit(false);
      continue;
    }
    switch (opcode) {
      case 0: {  // extended
        const auto length = static_cast<std::size_t>(reader.variable(false));
        const std::size_t next = reader.at() + length;
        const unsigned extended = reader.number<std::uint8_t>();
        if (extended == 1) emit(true);
        if (extended == 2) row.address = reader.number<std::uint64_t>();
        reader.seek(next);
        break;
      }
      case 1:
        emit(false);
        break;
      case 2:
        advance(static_cast<std::uint64_t>(reader.variable(false)));
        break;
      case 3:
        row.line += reader.variable(true);
        break;
      case 4:
        row.file = static_cast<std::uint64_t>(reader.variable(false));
        break;
      case 8:
        advance((255u - opcode_base) / line_range);
        break;
      case 9:
        row.address += reader.number<std::uint16_t>();
        break;
      default:
        for (unsigned i = 0; i < operands[opcode]; ++i) reader.variable(false);
    }
  }
  reader.seek(end);
}

}  // namespace

std::string line_of(const std::string& path, std::uint64_t offset) {
  std::ifstream stream(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(stream), {}};
  Reader reader(section(file, ".debug_line"));
  std::string found;
  while (!reader.done()) {
    const auto length = reader.number<std::uint32_t>();
    if (length == 0 || length >= 0xfffffff0u) break;
    run(reader, reader.at() + length, offset, found);
  }
  return found;
}

}  // namespace emulator
