#include "shadow.h"

#include <algorithm>
#include <bit>

namespace emulator {

Shadow::Shadow(std::size_t bytes, std::size_t element_bytes, bool private_to_group)
    : bytes_(bytes),
      shift_(static_cast<unsigned>(std::countr_zero(element_bytes))),
      private_to_group_(private_to_group),
      cells_((bytes + element_bytes - 1) >> shift_) {}

void Shadow::initialise() {
  for (Cell& cell : cells_) cell.write.group = Stamp::host;
}

void Shadow::refine(unsigned shift) {
  std::vector<Cell> finer((bytes_ + (std::size_t{1} << shift) - 1) >> shift);
  for (std::size_t i = 0; i < finer.size(); ++i) finer[i] = cells_[i >> (shift_ - shift)];
  cells_ = std::move(finer);
  shift_ = shift;
}

// All members of a group pass its barriers together, so equal counts mean that no barrier lies between two accesses.
bool Shadow::ordered(const Stamp& earlier, const Stamp& me) const {
  if (expired(earlier, me) || earlier.group == Stamp::host) return true;
  if (earlier.group != me.group || earlier.scope == AccessScope::grid) return false;
  if (earlier.barriers != me.barriers) return true;
  if (earlier.scope == AccessScope::threadgroup || earlier.thread / 32 != me.thread / 32) return false;
  if (earlier.simd_barriers != me.simd_barriers) return true;
  return earlier.scope == AccessScope::lane && me.scope == AccessScope::lane && earlier.thread == me.thread;
}

// Leaves the cell as it was when the verdict is bad.
Verdict Shadow::record(Cell& cell, Access access, const Stamp& me) const {
  if (reads(access) && expired(cell.write, me)) return Verdict::uninitialised;
  const bool after_atomic = atomic(access) && cell.write.atomic;
  if (!after_atomic && !ordered(cell.write, me)) return Verdict::race_with_write;
  if (!writes(access)) {
    Stamp merged = me;
    merged.atomic = atomic(access);
    if (!ordered(cell.read, me)) {  // no barrier between these readers: keep the scope of both
      const Stamp& other = cell.read;
      if (other.group != me.group || other.scope == AccessScope::grid) {
        merged.scope = AccessScope::grid;
      } else if (other.scope == AccessScope::threadgroup || other.thread / 32 != me.thread / 32) {
        merged.scope = AccessScope::threadgroup;
      } else {
        merged.scope = AccessScope::simdgroup;
      }
      merged.atomic = merged.atomic && other.atomic;
    }
    cell.read = merged;
    return Verdict::fine;
  }
  const bool after_atomic_read = atomic(access) && cell.read.atomic;
  if (!after_atomic_read && !ordered(cell.read, me)) return Verdict::race_with_read;
  cell.write = me;
  cell.write.atomic = atomic(access);
  return Verdict::fine;
}

Finding Shadow::record(std::size_t offset, std::size_t bytes, Access access, const Stamp& me) {
  const auto shift = static_cast<unsigned>(std::countr_zero(offset | bytes));
  if (shift < shift_) refine(shift);
  const std::size_t end = (offset + bytes) >> shift_;
  for (std::size_t i = offset >> shift_; i < end; ++i) {
    const Verdict verdict = record(cells_[i], access, me);
    if (verdict != Verdict::fine)
      return {verdict, i << shift_, verdict == Verdict::race_with_read ? cells_[i].read : cells_[i].write};
  }
  return {};
}

Shadow::Unwritten Shadow::unwritten() const {
  Unwritten found{bytes_, 0};
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    if (cells_[i].write.group != Stamp::none) continue;
    const std::size_t first = i << shift_;
    if (found.count == 0) found.first = first;
    found.count += std::min(std::size_t{1} << shift_, bytes_ - first);
  }
  return found;
}

}  // namespace emulator
