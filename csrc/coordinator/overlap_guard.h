// Keeps operations on overlapping memory apart, in whichever groups they are.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm {

// The memory of all unfinished operations of the process, in the order of submission. c10d's callers expect that
// all_reduce(x) twice means twice, as on a stream; so an operation is offered only when no unfinished one that was
// submitted before it overlaps what it touches. The order of submission decides, not that of offering: a later
// operation that slipped in before one that still waits would compute with the wrong values, and on two ranks that let
// different ones in first each would wait for the other's. Thread-safe.
class OverlapGuard {
 public:
  // At submission, in the order in which the group's queue takes operations. Refused, with what is in the way, where
  // the transport may still write the memory for an operation that was given up: waiting for it could take for ever.
  std::optional<std::string> enter(Operation& operation);
  // Whether nothing submitted before is in the way any more.
  bool clear(const Operation& operation) const;
  // What is, in words; empty if nothing is.
  std::string in_the_way(const Operation& operation) const;
  void leave(const Operation& operation);
  // The operation was given up: its memory is free again, or lost to the transport that still writes it.
  void abandon(const Operation& operation);
  bool empty() const;

 private:
  struct Entry {
    uintptr_t end;
    const Operation* owner;
  };
  using Ranges = std::multimap<uintptr_t, Entry>;  // by beginning
  static const Operation* blocker(const Ranges& ranges, uintptr_t longest, const MemoryRange& range,
                                  const Operation& by);
  const Operation* blocker(const Operation& operation) const;
  static void erase(Ranges& ranges, const MemoryRange& range, const Operation& owner);
  void erase_all(const Operation& operation);

  mutable std::mutex mutex_;  // guards everything below
  Ranges writers_;
  Ranges readers_;
  std::vector<const Operation*> lost_;  // given up, and still written
  uintptr_t longest_writer_ = 0;        // bounds how far back an overlapping range can begin
  uintptr_t longest_reader_ = 0;
  uint64_t next_ticket_ = 0;
};

}  // namespace multicomm
