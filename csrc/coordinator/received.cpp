#include "coordinator/received.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <functional>

#include "coordinator/reduce_kernels.h"
#include "transport/transport.h"

namespace multicomm {

namespace {

// Whether a rank that has joined can stand in for it.
bool possible(const Descriptor& d, uint32_t group_size) {
  constexpr uint64_t kMost = uint64_t{1} << 56;
  const bool combines = is_reduction(d.kind);
  const bool uneven = d.count == kUneven && (d.kind == OpKind::kAllGather || d.kind == OpKind::kReduceScatter ||
                                             d.kind == OpKind::kGatherVariable);
  return d.kind <= OpKind::kRecv && size_of(d.dtype) > 0 && d.device <= DeviceKind::kCuda &&
         d.root < static_cast<int32_t>(group_size) && (uneven || d.count <= kMost / std::max(group_size, 1u)) &&
         d.reduce_op <= ReduceOp::kPremulSum && (!combines || can_reduce(d.dtype, d.reduce_op));
}

}  // namespace

const char* implausible(const Record& mine, const Record& result) {
  if (result.active > mine.group_size || result.active < mine.active) return "other members than there are";
  const uint32_t most = mine.active > 0 ? mine.offered : result.active > 0 ? kMaxOffered : 0;
  if (result.offered > most || result.agreed > result.offered) return "more operations than were offered";
  uint32_t agreed = 0;
  for (uint32_t run = 0; run < kMaxDescriptors && agreed < result.agreed; ++run) {
    const Descriptor& d = result.descriptors[run];
    const bool offered = mine.active > 0
                             ? d.agrees_with(mine.descriptors[run]) && result.repeats[run] <= mine.repeats[run]
                             : possible(d, mine.group_size);
    if (!offered) return "an operation that this rank did not offer";
    agreed += result.repeats[run];
    const bool last = mine.active > 0 && result.repeats[run] < mine.repeats[run];
    if (last && agreed < result.agreed) return "an operation that this rank did not offer";
  }
  if (agreed != result.agreed) return "fewer operations than it says";
  if (!result.names.submitted.within(mine.names.submitted) || !result.names.unchanged.within(mine.names.unchanged))
    return "names that this rank did not offer";
  if (result.newest_joiner >= mine.group_size || result.sequence < mine.sequence) return "a join that cannot be";
  const NameRecord& names = result.names;
  if (names.fresh_count > kNewNames) return "more new names than a round takes";
  const auto* const end = names.fresh + names.fresh_count;
  if (std::adjacent_find(names.fresh, end, std::greater_equal<>()) != end) return "new names out of order";
  if (result.leaving > mine.group_size) return "more members that leave than there are";
  return nullptr;
}

std::string text_in(const char* field, size_t size) { return {field, strnlen(field, size)}; }

std::optional<PieceSizes> piece_sizes(const std::vector<TableEntry>& table) {
  constexpr int64_t kMost = int64_t{1} << 56;  // over all members: their bytes, of whatever dtype, can be counted
  PieceSizes all;
  int64_t sums[2] = {};
  for (const TableEntry& entry : table) {
    const char* const end = entry.text + strnlen(entry.text, sizeof(entry.text));
    const char* at = entry.text;
    int64_t numbers[2] = {};
    for (int i = 0; i < 2; ++i) {
      const auto [stop, error] = std::from_chars(at, end, numbers[i]);
      const bool ends_well = i == 0 ? stop != end && *stop == ' ' : stop == end;
      if (error != std::errc() || !ends_well || numbers[i] < 0 || numbers[i] > kMost - sums[i]) return std::nullopt;
      sums[i] += numbers[i];
      at = stop + 1;
    }
    all.sizes.push_back(numbers[0]);
    all.elements.push_back(numbers[1]);
  }
  return all;
}

}  // namespace multicomm
