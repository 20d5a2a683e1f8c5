// Small operations ride in the record: where each lies, how it is packed, combined and unpacked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "coordinator/descriptor.h"

namespace multicomm {

class Operation;

// Assigns room in the payload to the leading operations, from descriptors alone, so that all ranks place alike.
class InlineLayout {
 public:
  struct Slot {
    size_t offset;
    size_t bytes;
  };
  explicit InlineLayout(uint32_t group_size) : group_size_(group_size) {}
  // Room for the next operation; nothing once one did not fit: the inline operations are a prefix.
  std::optional<Slot> place(const Descriptor& descriptor);
  // Whether the operation could ride in an empty record, a function of its size alone.
  bool eligible(const Descriptor& descriptor) const;

 private:
  std::optional<size_t> bytes_of(const Descriptor& descriptor) const;
  uint32_t group_size_;
  size_t used_ = 0;
  bool closed_ = false;
};

// Writes this rank's contribution; `payload` is zeroed (pieces of different ranks are merged by bitwise or).
void pack_inline(const Operation& operation, int rank, std::byte* payload);
void combine_inline(const Descriptor& descriptor, size_t bytes, const std::byte* in, std::byte* inout);
// Writes the agreed result to the operation's outputs. `payload` is changed in place by averaging.
void unpack_inline(Operation& operation, int rank, int group_size, std::byte* payload);

}  // namespace multicomm
