#include "workload.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "coordinator/descriptor.h"

namespace multicomm::scale {
namespace {

struct Action {
  enum Type : uint8_t { kCompute, kSubmit, kEitherOrder, kWait } type;
  Kind kind = kWorld;
  What what{};
  Time mean = 0;
};
constexpr Action compute(Time microseconds) { return {Action::kCompute, kWorld, {}, microseconds * 1000}; }
constexpr Action small(Kind kind) { return {Action::kSubmit, kind, {OpKind::kAllReduce, kSmall, false}}; }
constexpr Action large(Kind kind) { return {Action::kSubmit, kind, {OpKind::kAllReduce, 1 << 16, false}}; }
constexpr Action on_device(Kind kind) { return {Action::kSubmit, kind, {OpKind::kAllReduce, 1 << 16, true}}; }
constexpr Action exchange(Kind kind) { return {Action::kSubmit, kind, {OpKind::kAllToAll, 0, false}}; }
constexpr Action either_order() { return {Action::kEitherOrder}; }  // of the next two, drawn by each rank
constexpr Action wait_all() { return {Action::kWait}; }

// One step. Ranks that submit to two groups in different orders are what other backends deadlock on.
constexpr Action kStep[] = {
    // forward: two layers, with experts
    compute(40),
    either_order(),
    on_device(kTensor),
    exchange(kExpert),
    wait_all(),
    compute(40),
    either_order(),
    on_device(kTensor),
    small(kExpert),
    wait_all(),
    // to the next pipeline stage
    small(kPipeline),
    wait_all(),
    small(kWorld),
    wait_all(),
    // backward: gradients as they come
    compute(30),
    large(kData),
    either_order(),
    small(kTensor),
    on_device(kData),
    compute(30),
    either_order(),
    on_device(kData),
    on_device(kPipeline),
    compute(30),
    either_order(),
    large(kData),
    small(kExpert),
    wait_all(),
    // the norm of the gradients, the loss
    either_order(),
    small(kWorld),
    small(kData),
    wait_all(),
};
constexpr size_t kActions = std::size(kStep);

uint64_t draw(uint64_t& state) { return mix(state += 0x9e3779b97f4a7c15u); }
double draw_unit(uint64_t& state) { return static_cast<double>(draw(state) >> 11) * 0x1p-53; }

}  // namespace

uint32_t Samples::quantile(double share) {
  if (values_.empty()) return 0;
  const auto at = values_.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values_.size() - 1) + 0.5);
  std::nth_element(values_.begin(), at, values_.end());
  return *at;
}

Ledger::Entry& Ledger::entry(const Group& group, uint64_t sequence) {
  Open& open = open_[static_cast<size_t>(group.number)];
  if (sequence < open.first) throw std::logic_error("an operation came to its end twice");
  const size_t at = sequence - open.first;
  if (at >= open.entries.size()) open.entries.resize(at + 1);
  return open.entries[at];
}

void Ledger::submitted(const Group& group, uint64_t sequence, bool device, Time now) {
  Entry& e = entry(group, sequence);
  ++e.submitted;
  e.device = device;
  e.last_submitted = std::max(e.last_submitted, now);
}

void Ledger::agreed(const Group& group, uint64_t sequence, Time now) {
  Entry& e = entry(group, sequence);
  if (e.submitted != group.size()) throw std::logic_error("agreed before all members had submitted");
  e.last_agreed = std::max(e.last_agreed, now);
  if (++e.agreed == group.size()) agreement[group.kind].add(e.last_agreed - e.last_submitted);
  retire(group);
}

void Ledger::launched(const Group& group, uint64_t sequence, Time now) {
  Entry& e = entry(group, sequence);
  e.last_launched = std::max(e.last_launched, now);
  if (++e.launched == group.size()) device_launch[group.kind].add(e.last_launched - e.last_submitted);
  retire(group);
}

void Ledger::retire(const Group& group) {
  Open& open = open_[static_cast<size_t>(group.number)];
  const auto over = [&](const Entry& e) {
    return e.agreed == group.size() && (!e.device || e.launched == group.size());
  };
  while (!open.entries.empty() && over(open.entries.front())) {
    open.entries.pop_front();
    ++open.first;
  }
}

Time DataModel::duration(const Group& group, size_t bytes) const {
  const Time latency = group.kind == kTensor ? network_.inside : network_.between;
  return ceil_log2(group.size()) * (latency + network_.send + network_.receive) + 2 * network_.transfer(bytes);
}

void DataModel::launch(const Group& group, int rank, uint64_t number, bool device, size_t bytes, Time now, Done done) {
  if (device) {
    auto& stream = streams_[static_cast<size_t>(rank)];
    stream.push_back({&group, number, bytes, done});
    if (stream.size() == 1) begin(rank, now);
    return;
  }
  auto& meetings = host_[static_cast<size_t>(group.number)];
  Meeting& meeting = meetings[number];
  if (meeting.done.empty()) meeting.check = bytes;
  if (meeting.check != bytes) throw std::logic_error("members launched different batches");
  meeting.done.push_back(done);
  if (meeting.done.size() < group.members.size()) return;
  const Time end = now + duration(group, bytes);
  for (const Done& d : meeting.done) events_.at(end, *d.handler, d.what, d.with);
  meetings.erase(number);
}

void DataModel::begin(int rank, Time now) {
  const OnDevice& head = streams_[static_cast<size_t>(rank)].front();
  auto& meetings = device_[static_cast<size_t>(head.group->number)];
  Meeting& meeting = meetings[head.number];
  if (meeting.ranks.empty()) meeting.check = head.bytes;
  if (meeting.check != head.bytes) throw std::logic_error("members launched different device batches");
  meeting.ranks.push_back(rank);
  if (meeting.ranks.size() < head.group->members.size()) return;
  const Time end = now + duration(*head.group, head.bytes);
  for (const int r : meeting.ranks) events_.at(end, *this, static_cast<uint64_t>(r));
  meetings.erase(head.number);
}

void DataModel::happen(Time now, uint64_t rank, void*) {
  auto& stream = streams_[rank];
  const Done done = stream.front().done;
  stream.pop_front();
  if (!stream.empty()) begin(static_cast<int>(rank), now);
  done.handler->happen(now, done.what, done.with);
}

Programs::Programs(Mesh& mesh, Events& events, Ledger& ledger, int steps, uint64_t seed)
    : mesh_(mesh), events_(events), ledger_(ledger), ranks_(static_cast<size_t>(mesh.ranks())), left_(mesh.ranks()) {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ranks_[r].random = mix(seed + r);
    ranks_[r].steps = steps;
  }
}

std::array<int, kKinds> Programs::operations_per_step() {
  std::array<int, kKinds> count{};
  for (const Action& action : kStep)
    if (action.type == Action::kSubmit) ++count[action.kind];
  return count;
}

void Programs::start(Scheme& scheme) {
  scheme_ = &scheme;
  for (size_t r = 0; r < ranks_.size(); ++r) events_.at(0, *this, r);
}

void Programs::done(int rank, Time now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  if (--r.outstanding > 0 || !r.waits) return;
  r.waits = false;
  events_.at(now, *this, static_cast<uint64_t>(rank));  // not at once: the scheme is still at work
}

void Programs::submit(int rank, size_t action, Time now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  const auto& [type, kind, what, mean] = kStep[action];
  const uint64_t sequence = r.sequence[kind]++;
  ++r.outstanding;
  ledger_.submitted(*mesh_.place(rank, kind).group, sequence, what.device, now);
  scheme_->submit(rank, kind, sequence, what, now);
}

void Programs::go_on(int rank, Time now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  while (true) {
    if (r.at == kActions) {
      r.at = 0;
      if (--r.steps == 0) {
        end_ = std::max(end_, now);
        --left_;
        return;
      }
    }
    const Action& action = kStep[r.at++];
    switch (action.type) {
      case Action::kSubmit: submit(rank, r.at - 1, now); break;
      case Action::kEitherOrder: {
        const bool swapped = draw(r.random) % 2 == 0;
        submit(rank, r.at + (swapped ? 1 : 0), now);
        submit(rank, r.at + (swapped ? 0 : 1), now);
        r.at += 2;
        break;
      }
      case Action::kWait:
        if (r.outstanding == 0) break;
        r.waits = true;
        return;
      case Action::kCompute: {
        // An exponential tail of a tenth on top of the mean; one time in 500 somebody is three times as late.
        double time = static_cast<double>(action.mean) * (1 - 0.1 * std::log(1 - draw_unit(r.random)));
        if (draw(r.random) % 500 == 0) time *= 3;
        events_.at(now + static_cast<Time>(time), *this, static_cast<uint64_t>(rank));
        return;
      }
    }
  }
}

}  // namespace multicomm::scale
