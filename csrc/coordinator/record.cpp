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
    std::memcpy(inout.descriptors, in.descriptors, sizeof(inout.descriptors));
    std::memcpy(inout.payload, in.payload, sizeof(inout.payload));
    return;
  }
  inout.offered = std::min(in.offered, inout.offered);
  // Whatever a peer has sent, nothing is read or written beyond a record.
  const uint32_t common = std::min({in.agreed, inout.agreed, kMaxDescriptors});
  uint32_t agreed = 0;
  while (agreed < common && in.descriptors[agreed].agrees_with(inout.descriptors[agreed])) {
    inout.descriptors[agreed].checksum += in.descriptors[agreed].checksum;
    ++agreed;
  }
  inout.agreed = agreed;
  InlineLayout layout(inout.group_size);
  for (uint32_t i = 0; i < agreed; ++i) {
    const auto slot = layout.place(inout.descriptors[i]);
    if (!slot) break;
    combine_inline(inout.descriptors[i], slot->bytes, in.payload + slot->offset, inout.payload + slot->offset);
  }
}

}  // namespace multicomm
