#include "engine_scheme.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine_channel.h"
#include "memory_count.h"

namespace multicomm::scale {
namespace {

using Scope = MemoryCount::Scope;

Operation::Clock::time_point time_point(Time time) {
  return Operation::Clock::time_point(std::chrono::nanoseconds(time));
}

// Small ones move real data, whose sum is checked; the others' memory is never touched.
struct SimulatedOperation final : Operation {
  SimulatedOperation(const Group& group, const What& what, int rank, uint64_t address) : group(group), rank(rank) {
    descriptor.kind = what.kind;
    descriptor.dtype = DType::kInt64;
    descriptor.reduce_op = what.kind == OpKind::kAllReduce ? ReduceOp::kSum : ReduceOp::kNone;
    descriptor.device = what.device ? DeviceKind::kCuda : DeviceKind::kCpu;
    descriptor.count = what.count;
    small = what.count == kSmall;
    std::fill(std::begin(values), std::end(values), rank + 1);
    auto* data = small ? reinterpret_cast<std::byte*>(values) : reinterpret_cast<std::byte*>(address);
    const Segment segment{data, static_cast<int64_t>(what.count)};
    inputs = outputs = {segment};
    const auto begin = reinterpret_cast<uintptr_t>(data);
    ranges = {{begin, begin + std::max<uint64_t>(what.count * 8, 1), true}};
  }
  std::string describe() const override { return "all_reduce of " + std::to_string(descriptor.count); }
  void finish() override {
    if (!small) return;
    for (const int64_t value : values)
      if (value != group.sum) throw std::logic_error("a wrong sum in group " + std::to_string(group.number));
  }

  const Group& group;
  const int rank;
  bool small = false;
  int64_t values[kSmall];
};

}  // namespace

EngineScheme::Rank::Rank(EngineScheme& scheme, const Settings& settings, int number) : scheme(scheme), number(number) {
  const Scope scope(number);
  coordinator = std::make_unique<Coordinator>(settings, *this, *this);
}

size_t EngineScheme::Rank::poll() {
  taken.swap(arrived);
  for (const Arrival& arrival : taken) {
    if (arrival.channel != nullptr)
      arrival.channel->report(*static_cast<EngineChannel::Collective*>(arrival.collective));
    else arrival.batch->complete(nullptr);
  }
  const size_t count = taken.size();
  taken.clear();
  return count;
}

void EngineScheme::Rank::completed(OperationPtr operation) {
  const Scope scope(MemoryCount::kSimulation);
  if (operation->error()) {
    if (operation->error()->message.find("disagree") == std::string::npos)
      throw std::logic_error(operation->error()->message);
    ++scheme.disagreements_;
    return;
  }
  scheme.programs_.done(number, scheme.cpus_.free(number));
}

void EngineScheme::Rank::step_at(Time time) {
  if (std::exchange(step_due, true)) return;
  scheme.events_.at(std::max(time, scheme.cpus_.free(number)), *this);
}

void EngineScheme::Rank::happen(Time now, uint64_t, void*) {
  step_due = false;
  ++scheme.engine_steps_;
  const Time begun = scheme.cpus_.take(number, now, scheme.network_.step);
  const Scope scope(number);
  coordinator->step(time_point(begun));
}

EngineScheme::EngineScheme(Mesh& mesh, Events& events, const Network& network, const Settings& settings,
                           Algorithm algorithm, Ledger& ledger, DataModel& data, Programs& programs)
    : mesh_(mesh),
      events_(events),
      network_(network),
      algorithm_(algorithm),
      ledger_(ledger),
      data_(data),
      programs_(programs),
      cpus_(mesh.ranks()),
      shared_(mesh.groups().size()),
      handled_(static_cast<size_t>(mesh.ranks())) {
  for (int r = 0; r < mesh.ranks(); ++r) ranks_.push_back(std::make_unique<Rank>(*this, settings, r));
  channels_.resize(ranks_.size());
  for (Group& group : mesh.groups()) {
    for (int m = 0; m < group.size(); ++m) {
      const int r = group.members[static_cast<size_t>(m)];
      Rank& rank = *ranks_[static_cast<size_t>(r)];
      const auto channel = std::make_shared<EngineChannel>(*this, group, m);
      channels_[static_cast<size_t>(r)][group.kind] = channel.get();
      const Scope scope(r);
      rank.groups[group.kind] = rank.coordinator->add_group({kKindNames[group.kind], group.members, m});
      rank.groups[group.kind]->connect(channel);
    }
  }
  for (const auto& rank : ranks_) rank->step_at(0);
}

EngineScheme::~EngineScheme() = default;

EngineScheme::Packet* EngineScheme::take_packet() {
  if (free_packets_.empty()) {
    packets_.push_back(std::make_unique<Packet>());
    return packets_.back().get();
  }
  Packet* packet = free_packets_.back();
  free_packets_.pop_back();
  return packet;
}

void EngineScheme::submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) {
  Rank& r = *ranks_[static_cast<size_t>(rank)];
  const GroupPtr& group = r.groups[kind];
  const uint64_t address = (uint64_t{kind} + 1) << 44 | (sequence % (1 << 16)) << 24;
  OperationPtr operation = std::make_shared<SimulatedOperation>(*mesh_.place(rank, kind).group, what, rank, address);
  operation->submitted = time_point(now);
  {
    const Scope scope(rank);
    r.coordinator->submit(group, std::move(operation));
  }
  r.step_at(now);
}

void EngineScheme::look(Time now) {
  for (const auto& rank : ranks_) rank->step_at(now);
  events_.run();
}

bool EngineScheme::disagree(const Group& group, Time now) {
  disagreements_ = 0;
  for (int m = 0; m < group.size(); ++m)
    submit(group.members[static_cast<size_t>(m)], group.kind, 0, {OpKind::kAllReduce, m == 1 ? 1001u : 1000u, false},
           now);
  events_.run();
  return disagreements_ == group.size();
}

uint64_t EngineScheme::messages() const {
  uint64_t sum = 0;
  for (const Traffic& t : traffic) sum += t.round_messages + t.order_messages + t.table_messages;
  return sum;
}

}  // namespace multicomm::scale
