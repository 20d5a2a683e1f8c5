// The record of a round and how two records combine (docs/design.md, "Rounds").
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "coordinator/descriptor.h"
#include "coordinator/names.h"

namespace multicomm {

inline constexpr uint32_t kProtocolVersion = 2;
inline constexpr uint32_t kMaxDescriptors = 48;  // "W": runs of operations offered in one round
inline constexpr uint32_t kMaxOffered = 4096;    // operations offered in one round
inline constexpr size_t kInlineBytes = 1024;
inline constexpr uint32_t kNobody = UINT32_MAX;

// One element of the control all-reduce. Everything in it is a function of what the ranks put in, so all members
// read the same result. Kept below 4 KiB, which shared-memory transports send as one eager fragment.
struct Record {
  uint32_t group_size = 0;
  uint32_t offered = 0;               // minimum: operations that every member has submitted, at most kMaxDescriptors
  uint32_t agreed = 0;                // length of the prefix on which the descriptors agree; <= offered
  uint32_t leaving = 0;               // sum: members that have destroyed the group
  uint32_t lowest_leaving = kNobody;  // minimum over ranks
  uint32_t lowest_failed = kNobody;   // minimum: a member that gave the group up (time-out, abort)
  // Sum: members that bring operations; a record is theirs, or one of a member that has joined, which goes along with
  // whatever the others agree on.
  uint32_t active = 1;
  uint32_t newest_joiner = 0;  // group rank: of newest_join, the highest
  uint64_t clock = 0;          // maximum: the logical clock of the launch order
  uint64_t sequence = 0;       // maximum: of the join, where the member has joined
  int64_t newest_join = 0;     // maximum: when a member joined
  NameRecord names;
  // Operations that all ask for the same, one behind the other, are one run. What a run is depends on what the members
  // compare alone (see GroupState::offer_pending), so a common prefix is cut into the same runs everywhere.
  uint16_t repeats[kMaxDescriptors] = {};
  alignas(16) Descriptor descriptors[kMaxDescriptors];
  alignas(16) std::byte payload[kInlineBytes];
};
static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) < 4096);

// Calls use(first, count, descriptor) for each run of the first `operations`.
template <typename Use>
void for_runs(const Record& record, uint32_t operations, Use use) {
  for (uint32_t run = 0, at = 0; run < kMaxDescriptors && at < operations; ++run) {
    const uint32_t count = std::min<uint32_t>(record.repeats[run], operations - at);
    use(at, count, record.descriptors[run]);
    at += count;
  }
}
// Of one of the operations that are agreed on.
const Descriptor& descriptor_at(const Record& record, uint32_t operation);

// inout = combine(in, inout). Commutative in its result bits, since MPI may swap operands on some ranks; associative
// too, but for the rounding of floating-point sums and products. The result is what `agreed` and the other counters
// cover: descriptors and payload beyond the agreed prefix are left-overs. Runs inside MPI's progress on any thread:
// pure, no lock, no allocation, never throws. Safe for records of any content: they come from other processes.
void combine(const Record& in, Record& inout);

}  // namespace multicomm
