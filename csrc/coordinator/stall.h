// Who an operation waits for: what one group has asked its members, and what they said.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "coordinator/operation.h"
#include "transport/inquiry.h"

namespace multicomm {

struct GroupInfo;

// Driver only.
class Stall {
 public:
  using Clock = Operation::Clock;

  // `first_number`: tells the answers to several of a group apart.
  explicit Stall(uint64_t first_number) : number_(first_number) {}

  // Asks about `operation`: all other members, or the peer of a message. Nobody twice within kFresh.
  // The dead are not asked.
  void ask(const GroupInfo& info, const Operation& operation, uint64_t group, InquiryPlane& plane,
           Clock::time_point now);
  void answered(int rank, const Answer& answer);
  bool asked_about(const Operation& operation) const { return asked_ && ticket_ == operation.ticket; }
  // Whether what can be known is known: all have answered, or have had the time to.
  bool ready(Clock::time_point now) const;
  // "rank 2 has not submitted it; rank 3 does not answer" and, on a line for each of them, what it is doing. Empty when
  // nothing was asked.
  std::string describe(const GroupInfo& info, const Operation& operation) const;

  bool warned = false;  // of the operation asked about

 private:
  bool is_dead(int global_rank) const;

  static constexpr std::chrono::milliseconds kPatience{500};  // for answers
  static constexpr std::chrono::seconds kFresh{2};

  bool asked_ = false;
  uint64_t ticket_ = 0;
  uint64_t number_;
  Clock::time_point since_;
  std::vector<int> peers_;         // group ranks
  std::vector<int> dead_;          // global ranks
  std::map<int, Answer> answers_;  // by group rank
};

}  // namespace multicomm
