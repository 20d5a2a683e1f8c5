#include "coordinator/overlap_guard.h"

#include <algorithm>

namespace multicomm {

bool OverlapGuard::overlaps(const Ranges& ranges, uintptr_t longest, const MemoryRange& range, bool collectives_only) {
  const uintptr_t from = range.begin > longest ? range.begin - longest : 0;
  for (auto it = ranges.lower_bound(from); it != ranges.end() && it->first < range.end; ++it) {
    if (it->second.end <= range.begin) continue;
    // Two point-to-point operations are never ordered by their memory: a send that waits for a receive on the other
    // side, held back by a receive here, would be a deadlock that the program does not contain.
    if (collectives_only && is_point_to_point(it->second.owner->descriptor.kind)) continue;
    return true;
  }
  return false;
}

bool OverlapGuard::blocked(const MemoryRange& range, bool point_to_point) const {
  if (overlaps(writers_, longest_writer_, range, point_to_point)) return true;
  return range.write && overlaps(readers_, longest_reader_, range, point_to_point);
}

bool OverlapGuard::try_enter(const Operation& operation) {
  const bool point_to_point = is_point_to_point(operation.descriptor.kind);
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin < r.end && blocked(r, point_to_point)) return false;
  }
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin >= r.end) continue;
    (r.write ? writers_ : readers_).emplace(r.begin, Entry{r.end, &operation});
    uintptr_t& longest = r.write ? longest_writer_ : longest_reader_;
    longest = std::max(longest, r.end - r.begin);
  }
  return true;
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

void OverlapGuard::leave(const Operation& operation) {
  for (const MemoryRange& r : operation.ranges) {
    if (r.begin < r.end) erase(r.write ? writers_ : readers_, r, operation);
  }
  if (writers_.empty()) longest_writer_ = 0;
  if (readers_.empty()) longest_reader_ = 0;
}

}  // namespace multicomm
