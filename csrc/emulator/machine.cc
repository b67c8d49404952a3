#include "machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace emulator {

namespace {

// Reused by later launches; a launch needs one for each thread of its threadgroup.
thread_local std::vector<Stack> stacks;

// The flag of each kind of memory in mem_flags.
constexpr unsigned space_flag[] = {2, 1};

}  // namespace

bool Site::operator==(const Site& other) const {
  const auto same = [](const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; };
  return line == other.line && same(name, other.name) && same(file, other.file);
}

std::string Site::text() const { return std::string(name) + " at " + file + ":" + std::to_string(line); }

thread_local constinit Machine* Machine::running = nullptr;

bool Machine::in_stack(std::uintptr_t address, unsigned thread) {
  return address - reinterpret_cast<std::uintptr_t>(stacks[thread].begin()) < Stack::bytes;
}

Machine::Machine(std::string title, std::vector<Region> regions, Module module, std::uint64_t seed)
    : title_(std::move(title)),
      regions_(std::move(regions)),
      module_(std::move(module)),
      random_state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u),
      threadgroup_memory_(new char[threadgroup_address_space]) {
  counters_.buffers.resize(
      regions_.empty() ? 0
                       : 1 + std::max_element(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) {
                               return a.counter < b.counter;
                             })->counter);
}

std::uint32_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return static_cast<std::uint32_t>(random_state_ >> 32);
}

// Element e of a matrix lies in lane layout[e] / 2, as that lane's element layout[e] % 2. Metal does not define it.
void Machine::draw_matrix_layout() {
  std::iota(matrix_layout_.begin(), matrix_layout_.end(), std::uint8_t{0});
  for (unsigned i = 63; i > 0; --i) std::swap(matrix_layout_[i], matrix_layout_[random() % (i + 1)]);
}

// The layout that Apple's GPUs are known to have. A lane's two elements are neighbours in a row.
void Machine::take_apple_matrix_layout() {
  for (unsigned lane = 0; lane < simd_width; ++lane) {
    const unsigned quad = lane / 4, row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    for (unsigned i = 0; i < 2; ++i) matrix_layout_[row * 8 + column + i] = static_cast<std::uint8_t>(lane * 2 + i);
  }
}

std::optional<std::string> Machine::run(const Entry& entry, const std::array<std::uint32_t, 3>& grid,
                                        const std::array<std::uint32_t, 3>& threads, std::vector<void*> buffers) {
  const unsigned count = threads[0] * threads[1] * threads[2];
  entry_ = &entry;
  grid_ = grid;
  counters_.entry = entry.name;
  while (stacks.size() < count) stacks.emplace_back();
  threads_.resize(count);
  simdgroups_.resize((count + simd_width - 1) / simd_width);
  if (entry.apple_matrix_layout)
    take_apple_matrix_layout();
  else
    draw_matrix_layout();
  for (unsigned i = 0; i < count; ++i) {
    Arguments& arguments = threads_[i].arguments;
    arguments = {};
    std::copy(buffers.begin(), buffers.end(), arguments.buffers);
    arguments.thread_position_in_threadgroup[0] = i % threads[0];
    arguments.thread_position_in_threadgroup[1] = i / threads[0] % threads[1];
    arguments.thread_position_in_threadgroup[2] = i / threads[0] / threads[1];
    for (int axis = 0; axis < 3; ++axis) {
      arguments.threads_per_threadgroup[axis] = threads[axis];
      arguments.threadgroups_per_grid[axis] = grid[axis];
      arguments.threads_per_grid[axis] = threads[axis] * grid[axis];
    }
    arguments.thread_index_in_threadgroup[0] = i;
    arguments.thread_index_in_simdgroup[0] = i % simd_width;
    arguments.simdgroup_index_in_threadgroup[0] = i / simd_width;
    arguments.threads_per_simdgroup[0] = simd_width;
    arguments.simdgroups_per_threadgroup[0] = static_cast<unsigned>(simdgroups_.size());
  }
  // Threadgroups run in any order on a GPU.
  std::vector<std::uint32_t> order(std::size_t{grid[0]} * grid[1] * grid[2]);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);

  const FaultStack fault_stack(on_fault);
  Machine* const outer = running;
  running = this;
  for (const std::uint32_t number : order) {
    const unsigned at[] = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
    for (Thread& thread : threads_) {
      for (int axis = 0; axis < 3; ++axis) {
        thread.arguments.threadgroup_position_in_grid[axis] = at[axis];
        thread.arguments.thread_position_in_grid[axis] =
            at[axis] * threads[axis] + thread.arguments.thread_position_in_threadgroup[axis];
      }
    }
    group_ = number + 1;
    run_threadgroup();
    ++counters_.threadgroups;
    if (violation_) break;
  }
  running = outer;
  return violation_;
}

void Machine::fiber_main() {
  Machine& self = *running;
  const unsigned thread = self.running_;
  const Arguments arguments = self.threads_[thread].arguments;  // on the fiber's own stack, which it may read
  self.entry_->run(arguments);
  self.threads_[thread].state = State::done;
  self.simdgroups_[thread / simd_width].runnable &= ~(1u << thread % simd_width);
  void* abandoned;
  metal_emulator_switch(&abandoned, self.scheduler_);
}

// Runs on the small stack for faults, so the scheduler composes the message.
void Machine::on_fault(std::uintptr_t address) {
  if (running == nullptr || running->stack_ - address - 1 >= Stack::guard_bytes) return;
  running->overflowed_ = true;
  void* abandoned;
  metal_emulator_switch(&abandoned, running->scheduler_);
}

// A random SIMD-group runs as far as it can before another one does, its lanes in random order: this schedule exposes
// missing barriers best.
void Machine::run_threadgroup() {
  const unsigned count = static_cast<unsigned>(threads_.size());
  rendezvous_ = {count};
  barriers_ = {};
  accesses_ = 0;
  for (unsigned s = 0; s < simdgroups_.size(); ++s) {
    const unsigned members = std::min(simd_width, count - s * simd_width);
    simdgroups_[s].rendezvous = {members};
    simdgroups_[s].runnable = members == 32 ? ~0u : (1u << members) - 1;
    simdgroups_[s].barriers = {};
  }
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].context = stacks[i].start(fiber_main);
    threads_[i].state = State::runnable;
  }
  // A NaN in every floating-point type.
  for (const Variable& variable : variables_)
    std::memset(threadgroup_memory_.get() + variable.offset, 0xff, variable.bytes);

  const unsigned groups = static_cast<unsigned>(simdgroups_.size());
  for (;;) {
    const unsigned first = random() % groups;
    unsigned chosen = groups;
    for (unsigned i = 0; i < groups && chosen == groups; ++i)
      if (simdgroups_[(first + i) % groups].runnable != 0) chosen = (first + i) % groups;
    if (chosen == groups) break;
    Simdgroup& simdgroup = simdgroups_[chosen];
    while (simdgroup.runnable != 0) {
      const unsigned first_lane = random() % simd_width;
      const std::uint32_t from_first = simdgroup.runnable >> first_lane << first_lane;
      running_ = chosen * simd_width +
                 static_cast<unsigned>(std::countr_zero(from_first != 0 ? from_first : simdgroup.runnable));
      stack_ = reinterpret_cast<std::uintptr_t>(stacks[running_].begin());
      access_limit_ = std::min(accesses_ + most_accesses_of_thread, most_accesses_of_threadgroup);
      metal_emulator_switch(&scheduler_, threads_[running_].context);
      if (overflowed_) {
        violation_ = title_ + "stack overflow: " + thread_name(running_) + " needs more than " +
                     std::to_string(Stack::bytes / 1024) + " KiB for its own variables.";
      }
      if (violation_) return;
    }
  }
  if (std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.state != State::done; }))
    violation_ = title_ + deadlock();
}

std::string Machine::deadlock() const {
  std::string text = "deadlock: ";
  unsigned done = 0, listed = 0;
  std::vector<std::pair<Site, std::vector<unsigned>>> waiting;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    if (threads_[i].state == State::done) {
      ++done;
      continue;
    }
    auto found = std::find_if(waiting.begin(), waiting.end(),
                              [&](const auto& entry) { return entry.first == threads_[i].waits_at; });
    if (found == waiting.end()) found = waiting.insert(waiting.end(), {threads_[i].waits_at, {}});
    found->second.push_back(i);
  }
  for (const auto& [site, members] : waiting) {
    text += (listed++ == 0 ? "" : "; ") + std::to_string(members.size()) + " threads, the first " +
            thread_name(members[0]) + ", wait in " + site.text();
  }
  if (done > 0) text += "; " + std::to_string(done) + " threads have ended, and never come";
  return text + ".";
}

// Returns true in the last member to arrive.
bool Machine::arrive(Rendezvous& rendezvous, const Site& site) {
  if (rendezvous.arrived == 0) {
    rendezvous.site = site;
  } else if (!(rendezvous.site == site)) {
    violation("divergence: " + thread_name(running_) + " comes to " + site.text() +
              " while others of its group wait in " + rendezvous.site.text() + ".");
  }
  threads_[running_].waits_at = site;
  if (++rendezvous.arrived < rendezvous.members) return false;
  rendezvous.arrived = 0;
  return true;
}

void Machine::wait() {
  Thread& thread = threads_[running_];
  thread.state = State::waiting;
  simdgroups_[running_ / simd_width].runnable &= ~(1u << running_ % simd_width);
  metal_emulator_switch(&thread.context, scheduler_);
}

void Machine::wake(Simdgroup& simdgroup) {
  const unsigned first = static_cast<unsigned>(&simdgroup - simdgroups_.data()) * simd_width;
  for (unsigned i = 0; i < simdgroup.rendezvous.members; ++i) threads_[first + i].state = State::runnable;
  simdgroup.runnable = simdgroup.rendezvous.members == 32 ? ~0u : (1u << simdgroup.rendezvous.members) - 1;
}

void Machine::threadgroup_barrier(unsigned flags, const Site& site) {
  if (!arrive(rendezvous_, site)) return wait();
  ++counters_.threadgroup_barriers;
  for (int space : {threadgroup_space, device_space}) {
    if ((flags & space_flag[space]) == 0) continue;
    ++barriers_[space];
    for (Simdgroup& simdgroup : simdgroups_) simdgroup.barriers[space] = 0;
  }
  for (Simdgroup& simdgroup : simdgroups_) wake(simdgroup);
}

void Machine::simdgroup_barrier(unsigned flags, const Site& site) {
  collective(site, {}, [&](LaneOperands*, unsigned) {
    ++counters_.simdgroup_barriers;
    auto& barriers = simdgroups_[running_ / simd_width].barriers;
    for (int space : {threadgroup_space, device_space}) {
      if ((flags & space_flag[space]) == 0) continue;
      if (++barriers[space] == 0)
        violation("more SIMD-group barriers without a threadgroup barrier than can be counted.");
    }
  });
}

// The fiber stays where it is and never continues.
void Machine::violation(const std::string& what) {
  violation_ = title_ + what;
  void* abandoned;
  metal_emulator_switch(&abandoned, scheduler_);
  __builtin_unreachable();
}

}  // namespace emulator
