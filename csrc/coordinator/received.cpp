#include "coordinator/received.h"

#include <charconv>
#include <cstring>

#include "transport/transport.h"

namespace multicomm {

const char* implausible(const Record& mine, const Record& result) {
  if (result.offered > mine.offered || result.agreed > result.offered) return "more operations than were offered";
  for (uint32_t i = 0; i < result.agreed; ++i) {
    if (!result.descriptors[i].agrees_with(mine.descriptors[i])) return "an operation that this rank did not offer";
  }
  if (result.leaving > mine.group_size) return "more members that leave than there are";
  return nullptr;
}

std::string text_in(const char* field, size_t size) { return {field, strnlen(field, size)}; }

std::optional<std::vector<int64_t>> piece_sizes(const std::vector<TableEntry>& table) {
  constexpr int64_t kMost = int64_t{1} << 56;  // over all members: their bytes, of whatever dtype, can be counted
  std::vector<int64_t> sizes;
  int64_t sum = 0;
  for (const TableEntry& entry : table) {
    const char* const end = entry.text + strnlen(entry.text, sizeof(entry.text));
    int64_t size = 0;
    const auto [stop, error] = std::from_chars(entry.text, end, size);
    if (error != std::errc() || stop != end || size < 0 || size > kMost - sum) return std::nullopt;
    sum += size;
    sizes.push_back(size);
  }
  return sizes;
}

}  // namespace multicomm
