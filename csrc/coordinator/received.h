// What came from other processes, looked at before the engine acts on it. Members are trusted with results (a peer that
// lies about its data cannot be told from one that has it), never with this process's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/record.h"

namespace multicomm {

struct TableEntry;

// Null when `result` can be the outcome of a round into which this rank put `mine`, else what is wrong with it. The
// engine indexes by it, and takes what it agrees on for this rank's own operations.
const char* implausible(const Record& mine, const Record& result);

// The text in a field of fixed size, which a peer may have left without its end.
std::string text_in(const char* field, size_t size);

// What each member says of its piece: its size as the operation counts (see Operation::piece_size), and its elements.
struct PieceSizes {
  std::vector<int64_t> sizes;
  std::vector<int64_t> elements;
};
// Nothing when one of them says no such numbers.
std::optional<PieceSizes> piece_sizes(const std::vector<TableEntry>& table);

}  // namespace multicomm
