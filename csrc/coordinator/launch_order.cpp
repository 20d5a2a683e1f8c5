#include "coordinator/launch_order.h"

#include <algorithm>
#include <utility>

#include "coordinator/faults.h"

namespace multicomm {

LaunchOrder::Place LaunchOrder::propose(uint64_t group, uint64_t number, std::function<void()> launch) {
  if (!fault(Fault::kProposalsRepeat)) ++clock_;
  const Place place{clock_, group, number};
  units_.emplace(place, Unit{std::move(launch)});
  return place;
}

void LaunchOrder::decide(const Place& proposed, uint64_t timestamp) {
  learn(timestamp);
  auto unit = units_.extract(proposed);
  if (unit.empty()) return;  // withdrawn meanwhile
  std::get<0>(unit.key()) = timestamp;
  unit.mapped().decided = true;
  units_.insert(std::move(unit));
  launch_due();
}

void LaunchOrder::withdraw(const std::vector<Place>& places) {
  for (const Place& place : places) units_.erase(place);
  launch_due();
}

void LaunchOrder::learn(uint64_t timestamp) { clock_ = std::max(clock_, timestamp); }

void LaunchOrder::launch_due() {
  while (!units_.empty() && units_.begin()->second.decided) {
    const auto launch = std::move(units_.begin()->second.launch);
    units_.erase(units_.begin());
    launch();
  }
}

}  // namespace multicomm
