#include "coordinator/overlap_guard.h"

#include <algorithm>

namespace multicomm {

namespace {

bool overlap(const Operation& a, const Operation& b) {
  for (const MemoryRange& x : a.ranges)
    for (const MemoryRange& y : b.ranges)
      if (x.begin < y.end && y.begin < x.end && (x.write || y.write)) return true;
  return false;
}

}  // namespace

std::optional<std::string> OverlapGuard::enter(Operation& operation) {
  const std::lock_guard lock(mutex_);
  for (const Operation* lost : lost_)
    if (overlap(*lost, operation)) return lost->describe();
  operation.ticket = next_ticket_++;
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin >= r.end) continue;
    (r.write ? writers_ : readers_).emplace(r.begin, Entry{r.end, &operation});
    uintptr_t& longest = r.write ? longest_writer_ : longest_reader_;
    longest = std::max(longest, r.end - r.begin);
  }
  return std::nullopt;
}

const Operation* OverlapGuard::blocker(const Ranges& ranges, uintptr_t longest, const MemoryRange& range,
                                       const Operation& by) {
  const uintptr_t from = range.begin > longest ? range.begin - longest : 0;
  const bool point_to_point = is_point_to_point(by.descriptor.kind);
  for (auto it = ranges.lower_bound(from); it != ranges.end() && it->first < range.end; ++it) {
    const Operation& other = *it->second.owner;
    if (it->second.end <= range.begin || other.ticket >= by.ticket) continue;
    // Two point-to-point operations are never ordered by their memory: a send that waits for a receive on the other
    // side, held back by a receive here, would be a deadlock that the program does not contain.
    if (point_to_point && is_point_to_point(other.descriptor.kind)) continue;
    return &other;
  }
  return nullptr;
}

const Operation* OverlapGuard::blocker(const Operation& operation) const {
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin >= r.end) continue;
    if (const Operation* writer = blocker(writers_, longest_writer_, r, operation)) return writer;
    if (!r.write) continue;
    if (const Operation* reader = blocker(readers_, longest_reader_, r, operation)) return reader;
  }
  return nullptr;
}

bool OverlapGuard::clear(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  return blocker(operation) == nullptr;
}

std::string OverlapGuard::in_the_way(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  const Operation* found = blocker(operation);
  return found == nullptr ? std::string() : found->describe();
}

void OverlapGuard::erase(Ranges& ranges, const MemoryRange& range, const Operation& owner) {
  auto [it, last] = ranges.equal_range(range.begin);
  for (; it != last; ++it) {
    if (it->second.owner == &owner && it->second.end == range.end) {
      ranges.erase(it);
      return;
    }
  }
}

void OverlapGuard::erase_all(const Operation& operation) {
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin < r.end) erase(r.write ? writers_ : readers_, r, operation);
  }
  if (writers_.empty()) longest_writer_ = 0;
  if (readers_.empty()) longest_reader_ = 0;
}

void OverlapGuard::leave(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (!operation.abandoned) return erase_all(operation);
  std::erase(lost_, &operation);
}

void OverlapGuard::abandon(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  erase_all(operation);
  if (operation.exposed) lost_.push_back(&operation);
}

bool OverlapGuard::empty() const {
  const std::lock_guard lock(mutex_);
  return writers_.empty() && readers_.empty();
}

}  // namespace multicomm
