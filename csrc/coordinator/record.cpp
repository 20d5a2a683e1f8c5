#include "coordinator/record.h"

#include <algorithm>

#include "coordinator/inline_payload.h"

namespace multicomm {

void combine(const Record& in, Record& inout) {
  inout.offered = std::min(in.offered, inout.offered);
  // Whatever a peer has sent, nothing is read or written beyond a record.
  const uint32_t common = std::min({in.agreed, inout.agreed, kMaxDescriptors});
  uint32_t agreed = 0;
  while (agreed < common && in.descriptors[agreed].agrees_with(inout.descriptors[agreed])) {
    inout.descriptors[agreed].checksum += in.descriptors[agreed].checksum;
    ++agreed;
  }
  inout.agreed = agreed;
  inout.leaving += in.leaving;
  inout.lowest_leaving = std::min(in.lowest_leaving, inout.lowest_leaving);
  inout.lowest_failed = std::min(in.lowest_failed, inout.lowest_failed);
  inout.clock = std::max(in.clock, inout.clock);

  InlineLayout layout(inout.group_size);
  for (uint32_t i = 0; i < agreed; ++i) {
    const auto slot = layout.place(inout.descriptors[i]);
    if (!slot) break;
    combine_inline(inout.descriptors[i], slot->bytes, in.payload + slot->offset, inout.payload + slot->offset);
  }
}

}  // namespace multicomm
