// The half of Machine that checks every access to memory and reports the wrong ones in words.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

namespace {

// The distance between two threadgroup variables: an index or a row that is off by one does not reach the next one.
constexpr std::size_t gap = 8 * 1024;

// A place is an instruction's offset in the module or, with this bit, the number of the site of a library operation.
constexpr std::uint32_t is_site = 1u << 31;

}  // namespace

void* Machine::threadgroup_variable(int id, const char* name, std::size_t bytes, std::size_t alignment) {
  for (const Variable& variable : variables_)
    if (variable.id == id) return threadgroup_memory_.get() + variable.offset;
  std::size_t total = bytes;
  for (const Variable& variable : variables_) total += (variable.bytes + 15) / 16 * 16;
  if (total > threadgroup_memory_limit) {
    violation("threadgroup memory: with `" + std::string(name) + "` the kernel holds " + std::to_string(total) +
              " bytes of it; the limit is " + std::to_string(threadgroup_memory_limit) + ".");
  }
  counters_.threadgroup_memory = total;
  const std::size_t offset = (variables_end_ + gap + 63) / 64 * 64;
  variables_end_ = offset + bytes;
  variables_.push_back({id, name, offset, bytes, Shadow(bytes, std::min<std::size_t>(alignment, 4), true)});
  std::memset(threadgroup_memory_.get() + offset, 0xff, bytes);
  return threadgroup_memory_.get() + offset;
}

Stamp Machine::stamp(int space, std::uint32_t place, AccessScope scope) const {
  Stamp stamp;
  stamp.group = group_;
  stamp.place = place;
  stamp.barriers = barriers_[space];
  stamp.simd_barriers = simdgroups_[running_ / simd_width].barriers[space];
  stamp.thread = static_cast<std::uint16_t>(running_) & 1023;
  stamp.scope = scope;
  return stamp;
}

void Machine::check_access(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place,
                           AccessScope scope) {
  if (++accesses_ == access_limit_) report_endless_loop(place);
  if (address - stack_ < Stack::bytes) return;
  const auto shared = reinterpret_cast<std::uintptr_t>(threadgroup_memory_.get());
  if (address - shared < threadgroup_address_space) {
    const std::size_t offset = address - shared;
    for (Variable& variable : variables_) {
      if (offset - variable.offset >= variable.bytes || variable.bytes - (offset - variable.offset) < bytes) continue;
      if (reads(access)) counters_.threadgroup_bytes_read += bytes;
      if (writes(access)) counters_.threadgroup_bytes_written += bytes;
      return check_shadow(variable.shadow, threadgroup_space, variable.name, offset - variable.offset, bytes, access,
                          place, scope);
    }
    report_out_of_bounds(address, bytes, access, place);
  }
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    Region& region = regions_[(recent_ + i) % regions_.size()];
    const std::size_t offset = address - reinterpret_cast<std::uintptr_t>(region.begin);
    if (offset >= region.bytes || region.bytes - offset < bytes) continue;
    recent_ = (recent_ + i) % regions_.size();
    BufferTraffic& traffic = counters_.buffers[region.counter];
    if (reads(access)) traffic.bytes_read += bytes;
    if (writes(access)) traffic.bytes_written += bytes;
    if (region.shadow != nullptr)
      return check_shadow(*region.shadow, device_space, region.name, offset, bytes, access, place, scope);
    if (!writes(access)) return;
    violation("write to an operand: " + thread_name(running_) + " writes " + std::to_string(bytes) + " bytes at byte " +
              std::to_string(offset) + " of " + region.name + at(place) + ", which is read only.");
  }
  if (access == Access::read && address >= module_.begin && address + bytes <= module_.end) return;
  report_out_of_bounds(address, bytes, access, place);
}

void Machine::check_shadow(Shadow& shadow, int space, const std::string& name, std::size_t offset, std::size_t bytes,
                           Access access, std::uint32_t place, AccessScope scope) {
  const Finding finding = shadow.record(offset, bytes, access, stamp(space, place, scope));
  if (finding.verdict == Verdict::fine) return;
  const std::string here = thread_name(running_) + (!writes(access) ? " reads" : " writes") + " byte " +
                           std::to_string(finding.offset) + " of " + name + at(place);
  if (finding.verdict == Verdict::uninitialised)
    violation("uninitialised read: " + here + ", which has not been written.");
  const Stamp& other = finding.other;
  std::string whom = thread_name(other.thread);
  if (other.group != group_) {
    whom = "another threadgroup";
  } else if (other.scope != AccessScope::lane || scope != AccessScope::lane) {
    whom = "a lane of the SIMD-group of " + whom;
  }
  violation("race: " + here + ", which " + whom + (finding.verdict == Verdict::race_with_read ? " read" : " wrote") +
            at(other.place) + ", and no barrier lies between.");
}

void Machine::report_endless_loop(std::uint32_t place) {
  const bool alone = accesses_ < most_accesses_of_threadgroup;
  violation("a loop without end: " + (alone ? thread_name(running_) : "the threadgroup of " + thread_name(running_)) +
            " has accessed memory " + std::to_string(alone ? most_accesses_of_thread : accesses_) + " times" +
            (alone ? " without waiting for another" : "") + ", the last time" + at(place) + ".");
}

void Machine::report_out_of_bounds(std::uintptr_t address, std::size_t bytes, Access access, std::uint32_t place) {
  violation("out of bounds: " + thread_name(running_) + (writes(access) ? " writes " : " reads ") +
            std::to_string(bytes) + " bytes at " + describe(address) + at(place) + ".");
}

void Machine::report_misaligned(std::uintptr_t address, std::size_t alignment, const char* type,
                                const std::string& where) {
  violation("misaligned: " + thread_name(running_) + " uses " + describe(address) + " as " + type + where +
            "; its address must be a multiple of " + std::to_string(alignment) + ".");
}

// An address in words, relative to the nearest buffer or variable.
std::string Machine::describe(std::uintptr_t address) const {
  struct Near {
    std::string name;
    std::uintptr_t begin;
    std::size_t bytes;
  };
  std::vector<Near> all;
  const auto shared = reinterpret_cast<std::uintptr_t>(threadgroup_memory_.get());
  if (address - shared < threadgroup_address_space) {
    for (const Variable& v : variables_) all.push_back({"threadgroup variable " + v.name, shared + v.offset, v.bytes});
  } else {
    for (const Region& r : regions_) all.push_back({r.name, reinterpret_cast<std::uintptr_t>(r.begin), r.bytes});
  }
  const Near* nearest = nullptr;
  std::uintptr_t distance = 1u << 30;
  for (const Near& near : all) {
    const std::uintptr_t end = near.begin + near.bytes;
    const std::uintptr_t away = address < near.begin ? near.begin - address : address < end ? 0 : address - end;
    if (away < distance) {
      distance = away;
      nearest = &near;
    }
  }
  if (nearest != nullptr) {
    return "byte " + std::to_string(static_cast<std::int64_t>(address - nearest->begin)) + " of " + nearest->name +
           ", which has " + std::to_string(nearest->bytes) + " bytes,";
  }
  for (unsigned i = 0; i < threads_.size(); ++i) {
    if (!in_stack(address, i)) continue;
    return i == running_ ? "an address in its own memory" : "an address in another thread's own memory";
  }
  return "an address that belongs to no buffer";
}

std::string Machine::position(const unsigned* at) const {
  std::string text = "(";
  for (int axis = 0; axis < 3; ++axis) text += std::to_string(at[axis]) + (axis < 2 ? ", " : ")");
  return text;
}

std::string Machine::thread_name(unsigned thread) const {
  return "thread " + std::to_string(thread) + " of threadgroup " +
         position(threads_[thread].arguments.threadgroup_position_in_grid);
}

std::uint32_t Machine::site_number(const Site& site) {
  const auto found = std::find(sites_.begin(), sites_.end(), site);
  if (found == sites_.end()) return sites_.push_back(site), (static_cast<std::uint32_t>(sites_.size()) - 1) | is_site;
  return static_cast<std::uint32_t>(found - sites_.begin()) | is_site;
}

std::string Machine::at(std::uint32_t place) const {
  if ((place & is_site) != 0) return " in " + sites_[place & ~is_site].text();
  if (place >= module_.end - module_.begin) return "";
  const std::string text = module_.place(place);
  return text.empty() ? "" : " at " + text;
}

}  // namespace emulator
