#include "rivals.h"

#include <algorithm>
#include <stdexcept>

namespace multicomm::scale {
namespace {

constexpr size_t kRequestBytes = 64;

}  // namespace

CentralScheme::CentralScheme(Mesh& mesh, Events& events, const Network& network, Ledger& ledger, DataModel& data,
                             Programs& programs)
    : mesh_(mesh),
      events_(events),
      network_(network),
      ledger_(ledger),
      data_(data),
      programs_(programs),
      cpus_(mesh.ranks()),
      pending_(mesh.groups().size()),
      first_(mesh.groups().size()) {}

void CentralScheme::submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) {
  const Group& group = *mesh_.place(rank, kind).group;
  const auto number = static_cast<size_t>(group.number);
  auto& queue = pending_[number];
  while (queue.size() + first_[number] <= sequence)
    queue.push_back({.sequence = queue.size() + first_[number], .group = &group, .what = what});
  Pending& pending = queue[sequence - first_[number]];
  if (rank == 0) return request(pending, now);
  ++messages_;
  const Time left = cpus_.take(rank, now, network_.send);
  events_.at(left + network_.under_way(rank, 0, kRequestBytes), *this, kRequest, &pending);
}

void CentralScheme::request(Pending& pending, Time now) {
  if (++pending.submitted < pending.group->size()) return;
  for (const int member : pending.group->members) {
    if (member == 0) {
      answer(pending, 0, std::max(now, cpus_.free(0)));
      continue;
    }
    ++messages_;
    ++at_root_;
    const Time left = cpus_.take(0, now, network_.send);
    events_.at(left + network_.under_way(0, member, kRequestBytes), *this, static_cast<uint64_t>(member) + 1, &pending);
  }
}

void CentralScheme::answer(Pending& pending, int rank, Time now) {
  const Group& group = *pending.group;
  ledger_.agreed(group, pending.sequence, now);
  if (pending.what.device) ledger_.launched(group, pending.sequence, now);
  data_.launch(group, rank, pending.sequence, pending.what.device, pending.what.count * 8, now,
               {this, kDataDone | static_cast<uint64_t>(rank), nullptr});
  if (++pending.answered < group.size()) return;
  const auto number = static_cast<size_t>(group.number);
  auto& queue = pending_[number];
  while (!queue.empty() && queue.front().answered == group.size()) {
    queue.pop_front();
    ++first_[number];
  }
}

void CentralScheme::happen(Time now, uint64_t what, void* with) {
  if ((what & kDataDone) != 0) return programs_.done(static_cast<int>(what & ~kDataDone), now);
  auto& pending = *static_cast<Pending*>(with);
  if (what == kRequest) {
    ++at_root_;
    return request(pending, cpus_.take(0, now, network_.receive));
  }
  const int rank = static_cast<int>(what) - 1;
  answer(pending, rank, cpus_.take(rank, now, network_.receive));
}

LockstepScheme::LockstepScheme(Mesh& mesh, Events& events, const Network& network, Time cycle, Ledger& ledger,
                               DataModel& data, Programs& programs)
    : mesh_(mesh),
      events_(events),
      network_(network),
      cycle_(cycle),
      ledger_(ledger),
      data_(data),
      programs_(programs),
      sets_(mesh.groups().size()),
      ranks_(static_cast<size_t>(mesh.ranks())),
      handled_(static_cast<size_t>(mesh.ranks())) {
  for (const Group& group : mesh.groups()) {
    Set& set = sets_[static_cast<size_t>(group.number)];
    set.times.resize(group.members.size());
    set.submitted.resize(group.members.size());
  }
}

void LockstepScheme::start() {
  for (int r = 0; r < mesh_.ranks(); ++r) events_.at(0, *this, static_cast<uint64_t>(r));
}

void LockstepScheme::submit(int rank, Kind kind, uint64_t sequence, const What& what, Time) {
  Set& set = sets_[static_cast<size_t>(mesh_.place(rank, kind).group->number)];
  ranks_[static_cast<size_t>(rank)].submitted[kind] = sequence + 1;
  if (set.operations.size() == sequence) set.operations.push_back(what);
}

void LockstepScheme::enter(int rank, Time now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  const auto kind = static_cast<Kind>(r.at);
  const auto& [group, member] = mesh_.place(rank, kind);
  Set& set = sets_[static_cast<size_t>(group->number)];
  set.times[static_cast<size_t>(member)] = now;
  set.submitted[static_cast<size_t>(member)] = r.submitted[kind];
  if (++set.entered < group->size()) return;
  set.entered = 0;
  set.agreed = *std::min_element(set.submitted.begin(), set.submitted.end());
  all_reduce(*group, set);
  for (size_t m = 0; m < group->members.size(); ++m) {
    const int to = group->members[m];
    ranks_[static_cast<size_t>(to)].agreed[kind] = set.agreed;
    events_.at(set.times[m], *this, static_cast<uint64_t>(to), this);
  }
}

// The times at which the members leave, from those at which they entered. A background thread does nothing else
// meanwhile, so each message's time follows from the step before.
void LockstepScheme::all_reduce(const Group& group, Set& set) {
  const int n = group.size();
  const auto at = [](auto& list, int member) -> auto& { return list[static_cast<size_t>(member)]; };
  for (int k = 0; k < steps_of(Algorithm::kDoubling, n); ++k) {
    for (int m = 0; m < n; ++m) {
      if (step_of(Algorithm::kDoubling, m, n, k).send < 0) continue;
      at(set.times, m) += network_.send;
      ++messages_;
      ++handled_[static_cast<size_t>(at(group.members, m))];
    }
    before_ = set.times;
    for (int m = 0; m < n; ++m) {
      const int from = step_of(Algorithm::kDoubling, m, n, k).receive;
      if (from < 0) continue;
      const int sender = at(group.members, from), receiver = at(group.members, m);
      ++handled_[static_cast<size_t>(receiver)];
      const Time arrival = at(before_, from) + network_.under_way(sender, receiver, kRequestBytes);
      at(set.times, m) = std::max(at(before_, m), arrival) + network_.receive;
    }
  }
}

void LockstepScheme::leave(int rank, Time now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  const auto kind = static_cast<Kind>(r.at);
  const Group& group = *mesh_.place(rank, kind).group;
  const Set& set = sets_[static_cast<size_t>(group.number)];
  for (; r.done[kind] < r.agreed[kind]; ++r.done[kind]) {
    const uint64_t sequence = r.done[kind];
    const What& what = set.operations[sequence];
    ledger_.agreed(group, sequence, now);
    if (what.device) ledger_.launched(group, sequence, now);
    data_.launch(group, rank, sequence, what.device, what.count * 8, now,
                 {this, kDataDone | static_cast<uint64_t>(rank), nullptr});
  }
  if (++r.at < kKinds) return enter(rank, now);
  r.at = 0;
  cycles_ += rank == 0 ? 1 : 0;
  const Time next = std::max(now, r.cycle_begin + cycle_);
  r.cycle_begin = next;
  events_.at(next, *this, static_cast<uint64_t>(rank));
}

void LockstepScheme::happen(Time now, uint64_t what, void* with) {
  if ((what & kDataDone) != 0) return programs_.done(static_cast<int>(what & ~kDataDone), now);
  if (with != nullptr) return leave(static_cast<int>(what), now);
  enter(static_cast<int>(what), now);
}

}  // namespace multicomm::scale
