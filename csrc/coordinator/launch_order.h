// One order in which a device launches what overlapping groups have agreed on.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

namespace multicomm {

// A device runs collectives strictly in launch order and blocks in each until all members have come, so the devices of
// all ranks must launch overlapping communicators in one order. Each unit (the device batches of one round) gets a
// timestamp: the maximum of what its members propose, once all of them have submitted it (D. Skeen's algorithm, as
// described by Birman and Joseph, "Reliable communication in the presence of failures", ACM TOCS 5(1), 1987). A unit
// waits only for units whose own proposal here sorts before its timestamp; those need nobody's user code any more.
// Driver only.
class LaunchOrder {
 public:
  // Where a unit stands: timestamps first, then the group's identity, which all members know; the number tells the
  // units of one group apart.
  using Place = std::tuple<uint64_t, uint64_t, uint64_t>;

  // Enters a unit and returns this rank's proposal, greater than every timestamp proposed or learned before. `launch`
  // is called once, in order, unless the unit is withdrawn.
  Place propose(uint64_t group, uint64_t number, std::function<void()> launch);
  // The members' maximum is known. Launches what is due; `launch` may withdraw units.
  void decide(const Place& proposed, uint64_t timestamp);
  // Takes units out that are not launched yet: their members have given them up. Else nothing behind them would be
  // launched. All of a group at once, lest one of them be launched when another one goes.
  void withdraw(const std::vector<Place>& places);

  // The logical clock: travels in the records, so that proposals of busy and quiet ranks lie close together.
  uint64_t clock() const { return clock_; }
  void learn(uint64_t timestamp);
  bool empty() const { return units_.empty(); }

 private:
  struct Unit {
    std::function<void()> launch;
    bool decided = false;
  };
  void launch_due();

  uint64_t clock_ = 0;
  std::map<Place, Unit> units_;  // by timestamp, or by proposal until that is known
};

}  // namespace multicomm
