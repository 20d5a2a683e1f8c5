// What a rank that has joined brings to an operation of the others.
#pragma once

#include <string>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm {

// Whether an operation has a meaning where a member brings nothing.
bool joinable(const Descriptor& descriptor);

// Gives `stand_in` the agreed descriptor, and segments of the sizes that go with it, without memory. Nobody waits for
// it.
void lay_out_stand_in(Operation& stand_in, const Descriptor& agreed, int group_size);

// Takes part with elements that change nothing, or with no elements, and drops what comes. Made from what the others
// have agreed on.
class StandIn final : public Operation {
 public:
  StandIn(const Descriptor& agreed, int group_size);
  std::string describe() const override;
  void prepare() override;  // throws std::bad_alloc
  void set_piece_sizes(const std::vector<int64_t>& sizes) override;

 private:
  std::vector<std::byte> identity_;
};

}  // namespace multicomm
