// Keeps operations on overlapping memory apart, in whichever groups they are.
#pragma once

#include <cstdint>
#include <map>

#include "coordinator/operation.h"

namespace multicomm {

// The memory of all unfinished operations of the process. c10d's callers expect that all_reduce(x) twice means twice,
// as on a stream; so an operation is offered only when no unfinished one overlaps what it touches. Owned by the driver.
class OverlapGuard {
 public:
  // Registers the operation, or returns false (and registers nothing) while something unfinished is in the way.
  bool try_enter(const Operation& operation);
  void leave(const Operation& operation);
  bool empty() const { return writers_.empty() && readers_.empty(); }

 private:
  bool blocked(const MemoryRange& range, bool point_to_point) const;
  struct Entry {
    uintptr_t end;
    const Operation* owner;
  };
  using Ranges = std::multimap<uintptr_t, Entry>;
  static bool overlaps(const Ranges& ranges, uintptr_t longest, const MemoryRange& range, bool collectives_only);
  void erase(Ranges& ranges, const MemoryRange& range, const Operation& owner);

  Ranges writers_;
  Ranges readers_;
  uintptr_t longest_writer_ = 0;  // bounds how far back an overlapping range can begin
  uintptr_t longest_reader_ = 0;
};

}  // namespace multicomm
