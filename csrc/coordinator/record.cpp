#include "coordinator/record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "coordinator/inline_payload.h"

namespace multicomm {

void combine(const Record& in, Record& inout) {
  inout.leaving += in.leaving;
  inout.lowest_leaving = std::min(in.lowest_leaving, inout.lowest_leaving);
  inout.lowest_failed = std::min(in.lowest_failed, inout.lowest_failed);
  inout.clock = std::max(in.clock, inout.clock);
  inout.sequence = std::max(in.sequence, inout.sequence);
  const std::pair newest =
      std::max(std::pair(in.newest_join, in.newest_joiner), std::pair(inout.newest_join, inout.newest_joiner));
  inout.newest_join = newest.first;
  inout.newest_joiner = newest.second;
  combine(in.names, inout.names);
  const uint32_t active = inout.active;
  inout.active += in.active;
  if (in.active == 0) return;
  if (active == 0) {
    inout.offered = in.offered;
    inout.agreed = in.agreed;
    std::memcpy(inout.repeats, in.repeats, sizeof(inout.repeats));
    std::memcpy(inout.descriptors, in.descriptors, sizeof(inout.descriptors));
    std::memcpy(inout.payload, in.payload, sizeof(inout.payload));
    return;
  }
  inout.offered = std::min(in.offered, inout.offered);
  // Whatever a peer has sent, nothing is read or written beyond a record.
  const uint32_t common = std::min(in.agreed, inout.agreed);
  uint32_t agreed = 0;
  for (uint32_t run = 0; run < kMaxDescriptors && agreed < common; ++run) {
    Descriptor& descriptor = inout.descriptors[run];
    const uint32_t theirs = in.repeats[run], mine = inout.repeats[run];
    if (!in.descriptors[run].agrees_with(descriptor)) break;
    descriptor.checksum += in.descriptors[run].checksum;
    inout.repeats[run] = static_cast<uint16_t>(std::min(theirs, mine));
    agreed += inout.repeats[run];
    if (theirs != mine || mine == 0) break;  // where the shorter one ends, the other goes on with what is not common
  }
  inout.agreed = std::min(agreed, common);
  InlineLayout layout(inout.group_size);
  bool room = true;
  for_runs(inout, inout.agreed, [&](uint32_t, uint32_t count, const Descriptor& descriptor) {
    for (uint32_t i = 0; i < count && room; ++i) {
      const auto slot = layout.place(descriptor);
      room = slot.has_value();
      if (room) combine_inline(descriptor, slot->bytes, in.payload + slot->offset, inout.payload + slot->offset);
    }
  });
}

const Descriptor& descriptor_at(const Record& record, uint32_t operation) {
  uint32_t run = 0;
  for (uint32_t at = record.repeats[0]; at <= operation && run + 1 < kMaxDescriptors; at += record.repeats[run]) ++run;
  return record.descriptors[run];
}

}  // namespace multicomm
