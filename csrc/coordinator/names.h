// Operations that are matched by name: which names the members know in common, and what waits under each.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "coordinator/descriptor.h"
#include "coordinator/operation.h"

namespace multicomm {

inline constexpr uint32_t kNameSlots = 1024;  // names that a group knows at a time
inline constexpr uint32_t kNewNames = 32;     // that it gets to know in one round

// A set of slots.
struct SlotSet {
  uint64_t words[kNameSlots / 64] = {};
  bool has(uint32_t slot) const { return (words[slot / 64] >> (slot % 64) & 1) != 0; }
  void put(uint32_t slot) { words[slot / 64] |= uint64_t{1} << (slot % 64); }
  void remove(uint32_t slot) { words[slot / 64] &= ~(uint64_t{1} << (slot % 64)); }
  uint64_t size() const;
  bool within(const SlotSet& other) const;
};

// What a record says of names (docs/design.md, "Names"). Plain data.
struct NameRecord {
  SlotSet submitted;  // intersection: an operation waits under the name
  SlotSet unchanged;  // intersection: and asks for what was agreed on for the name before; within `submitted`
  // Smallest of the union, ascending: hashes of names without a slot, as distances from a place that all members know.
  uint64_t fresh[kNewNames] = {};
  uint32_t fresh_count = 0;
};
static_assert(std::is_trivially_copyable_v<NameRecord>);

// inout = combine(in, inout), associative and commutative. Safe for records of any content.
void combine(const NameRecord& in, NameRecord& inout);

// FNV-1a (Fowler, Noll, Vo), mixed. Neither 0 nor kJoinName.
uint64_t hash_of_name(std::string_view name);

// What the members match an operation by: the hash of its name, kJoinName, or 0 where it goes by its sequence.
inline constexpr uint64_t kJoinName = 1;
uint64_t name_of(const Operation& operation);

// The table is a function of the rounds' results alone, so all members have the same; what waits is this rank's. Of
// several operations under one name the n-th of one rank belongs to the n-th of the others. Driver only.
class NamedOperations {
 public:
  // Whether it was taken: not where another name has the same hash.
  bool add(OperationPtr operation);
  bool empty() const { return waiting_ == 0; }

  // Offers what waits. `enter(operation)` says whether its memory is free.
  template <typename Enter>
  void fill(NameRecord& mine, Enter enter);
  // A member that has joined is ready for every name.
  static void fill_joined(NameRecord& mine);

  struct Match {
    uint32_t slot;
    uint64_t hash;
    OperationPtr operation;  // null: this rank has joined
  };
  struct Matches {
    std::vector<OperationPtr> agreed;  // every member asks for the same as before: nothing is left to compare
    std::vector<Match> submitted;      // every member has submitted it
  };
  // What a round has shown to be submitted everywhere, in the order of slots; it no longer waits. `joined`: a member
  // has, and nothing is taken as agreed.
  Matches match(const NameRecord& result, bool joined);
  // Gives slots to the names that are new. After match(), which goes by the slots as they were.
  // Whether anything has come of it: a slot that was taken from a name that waits here is nothing gained.
  bool learn(const NameRecord& result);
  // All members have submitted `descriptor` under the name, and it fits together.
  void agreed(const Match& match, const Descriptor& descriptor);

  bool waits_for(uint64_t hash) const;
  // Takes out those that will never be offered, see Operation::hopeless.
  std::vector<OperationPtr> take_hopeless();
  // Takes out all but what the record in flight has offered.
  std::vector<OperationPtr> take_all_but(const NameRecord& offered);
  template <typename Use>
  void for_each(Use use) const;

 private:
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  struct Name {
    std::string text;  // empty: this rank has not submitted it since it is known
    uint32_t slot = kNoSlot;
    OperationPtr head;                // waits
    std::vector<OperationPtr> later;  // behind it
  };
  struct Slot {
    uint64_t hash;
    uint64_t used;  // when it was last given or matched, by clock_
    bool has_descriptor = false;
    Descriptor descriptor{};
  };
  OperationPtr take_head(Name& name);
  void propose(NameRecord& mine) const;
  uint32_t new_slot();

  std::unordered_map<uint64_t, Name> names_;  // by hash: with a slot, or with something waiting
  std::vector<Slot> slots_;
  SlotSet submitted_;
  SlotSet unchanged_;
  std::vector<uint32_t> unoffered_;  // slots whose head is in neither set yet
  std::vector<uint64_t> strangers_;  // hashes of names that have something waiting and no slot
  uint64_t cursor_ = 0;  // names get slots in the order of their hashes from here on, so none waits for ever
  uint64_t clock_ = 0;
  size_t waiting_ = 0;
};

template <typename Enter>
void NamedOperations::fill(NameRecord& mine, Enter enter) {
  std::erase_if(unoffered_, [&](uint32_t slot) {
    const OperationPtr& head = names_.at(slots_[slot].hash).head;
    if (!enter(head)) return false;
    submitted_.put(slot);
    const Slot& known = slots_[slot];
    const bool same = known.has_descriptor && !head->repeated && known.descriptor.agrees_with(head->descriptor) &&
                      known.descriptor.checksum == head->descriptor.checksum;
    if (same) unchanged_.put(slot);
    return true;
  });
  mine.submitted = submitted_;
  mine.unchanged = unchanged_;
  propose(mine);
}

template <typename Use>
void NamedOperations::for_each(Use use) const {
  for (const auto& [hash, name] : names_) {
    if (name.head) use(name.head);
    for (const OperationPtr& operation : name.later) use(operation);
  }
}

}  // namespace multicomm
