// Two other ways to agree, as models in the same virtual time, on the same network, for the same programs. They have no
// engine behind them and no errors to find; where a choice had to be made it is the one that favours them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "workload.h"

namespace multicomm::scale {

// One rank hears of every operation of every rank and tells the members when all have submitted. It spends `receive`
// and `send` on each message, one after the other.
class CentralScheme final : public Scheme, Handler {
 public:
  CentralScheme(Mesh& mesh, Events& events, const Network& network, Ledger& ledger, DataModel& data,
                Programs& programs);
  void submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) override;
  uint64_t messages() const { return messages_; }
  uint64_t busiest() const { return at_root_; }  // messages that the root sent or received

 private:
  struct Pending {
    uint64_t sequence = 0;
    const Group* group = nullptr;
    int submitted = 0;
    int answered = 0;
    What what;
  };
  static constexpr uint64_t kRequest = 0;  // else an answer, to rank `what - 1`
  static constexpr uint64_t kDataDone = uint64_t{1} << 32;
  void happen(Time now, uint64_t what, void* with) override;
  void request(Pending& pending, Time now);
  void answer(Pending& pending, int rank, Time now);

  Mesh& mesh_;
  Events& events_;
  const Network network_;
  Ledger& ledger_;
  DataModel& data_;
  Programs& programs_;
  Cpus cpus_;
  std::vector<std::deque<Pending>> pending_;  // by group
  std::vector<uint64_t> first_;               // by group, sequence of the front
  uint64_t messages_ = 0, at_root_ = 0;
};

// Horovod with process sets, in its steady state: the background thread of each rank goes through its sets one after
// the other, once a cycle, and in each takes part in one blocking all-reduce of a bit vector of what is ready
// (horovod/common/operations.cc, RunLoopOnce; controller.cc, ComputeResponseList and CoordinateCacheAndState;
// docs/process_set.rst). Every tensor is in the response cache, so the slower path by way of each set's coordinator
// (gather, then broadcast) is never taken, and carrying out the collectives costs the background thread nothing.
class LockstepScheme final : public Scheme, Handler {
 public:
  LockstepScheme(Mesh& mesh, Events& events, const Network& network, Time cycle, Ledger& ledger, DataModel& data,
                 Programs& programs);
  void submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) override;
  void start();  // cycles go on for ever: whoever runs the events does so by time
  uint64_t messages() const { return messages_; }
  uint64_t busiest() const { return *std::max_element(handled_.begin(), handled_.end()); }
  uint64_t cycles() const { return cycles_; }  // of rank 0

 private:
  struct Set {  // one process set in one cycle
    int entered = 0;
    std::vector<Time> times;          // when each member entered, then when it leaves
    std::vector<uint64_t> submitted;  // by member, when it entered
    std::vector<What> operations;     // those not agreed yet, from `agreed` on
    uint64_t agreed = 0;              // operations
  };
  struct Rank {
    Time cycle_begin = 0;
    int at = 0;  // set
    std::array<uint64_t, kKinds> submitted{}, done{}, agreed{};
  };
  static constexpr uint64_t kDataDone = uint64_t{1} << 32;
  void happen(Time now, uint64_t what, void* with) override;
  void enter(int rank, Time now);
  void leave(int rank, Time now);
  void all_reduce(const Group& group, Set& set);

  Mesh& mesh_;
  Events& events_;
  const Network network_;
  const Time cycle_;
  Ledger& ledger_;
  DataModel& data_;
  Programs& programs_;
  std::vector<Set> sets_;  // by group
  std::vector<Rank> ranks_;
  uint64_t messages_ = 0, cycles_ = 0;
  std::vector<uint64_t> handled_;  // messages that each rank sent or received
  std::vector<Time> before_;       // reused by all_reduce
};

}  // namespace multicomm::scale
