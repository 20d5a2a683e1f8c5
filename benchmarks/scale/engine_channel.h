// One rank's end of one group under EngineScheme.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine_scheme.h"
#include "memory_count.h"

namespace multicomm::scale {

// What combine() reads of a record: a simulated message is counted with its full size, but need not be copied so.
inline void copy_used(const Record& from, Record& to) {
  std::memcpy(static_cast<void*>(&to), &from, offsetof(Record, descriptors) + from.agreed * sizeof(Descriptor));
  std::memcpy(to.payload, from.payload, sizeof to.payload);
}

// The real interfaces of the transport, a schedule of messages behind them.
class EngineChannel final : public Channel, ControlPlane, DataPlane, DevicePlane, Handler {
 public:
  enum class Type : uint8_t { kNone, kRound, kOrder, kTable };
  // In flight: a round or a table, and beside it a second phase, as the engine may have them.
  struct Collective {
    Type type = Type::kNone;
    Algorithm algorithm = Algorithm::kDoubling;
    Completion* done = nullptr;
    uint64_t number = 0;
    int step = 0;
    bool sent_this_step = false;
    int sent = 0, received = 0;
  };

  EngineChannel(EngineScheme& world, Group& group, int member)
      : world_(world), group_(group), member_(member), rank_(group.members[static_cast<size_t>(member)]) {}

  ControlPlane& control() override { return *this; }
  DataPlane& data() override { return *this; }
  DevicePlane* device() override { return this; }
  void set_sink(PointToPointSink*) override {}
  bool idle() const override { return true; }
  uint64_t identity() const override { return static_cast<uint64_t>(group_.number) + 1; }

  void start_round(const Record& mine, Record& result, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    result = mine;
    record_ = &result;
    start(round_, Type::kRound, world_.algorithm_, done);
  }

  void start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    maximum = mine;
    value_ = &maximum;
    auto& order = world_.shared_[index()].orders[number_ + 1];
    ++order.started;
    order.last_start = std::max(order.last_start, cpu());
    start(order_, Type::kOrder, world_.algorithm_, done);
  }

  void start_table(const TableEntry& mine, TableEntry* all, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    auto& table = world_.shared_[index()].tables[number_ + 1];
    table.resize(group_.members.size());
    table[static_cast<size_t>(member_)] = mine;
    entries_ = all;
    start(round_, Type::kTable, Algorithm::kBruck, done);
  }

  void launch(Batch& batch, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    const bool device = batch.descriptor().device != DeviceKind::kCpu;
    size_t bytes = 0;
    for (const OperationPtr& operation : batch.operations) {
      bytes += operation->descriptor.count * 8;
      if (device) world_.ledger_.launched(group_, operation->sequence, cpu());
    }
    world_.data_.launch(group_, rank_, batch.number, device, bytes, cpu(), {this, kBatch, &done});
  }
  void launch(Batch& batch, bool, Completion& done) override { launch(batch, done); }
  void post(const OperationPtr&) override { throw std::logic_error("no point-to-point here"); }
  // Once per group: no part of what is measured.
  bool ready() const override { return true; }
  void introduce(int, const Operation&, TableEntry&) override {}
  std::string introduced(int, const std::vector<TableEntry>&) override { return {}; }
  void abort() override {}

  // The rank's driver has seen that a collective is over.
  void report(Collective& collective) {
    Completion* done = collective.done;
    account(collective);
    collective.type = Type::kNone;
    done->complete(nullptr);
  }

 private:
  static constexpr uint64_t kBatch = 1;
  using Packet = EngineScheme::Packet;

  size_t index() const { return static_cast<size_t>(group_.number); }
  Time cpu() const { return world_.cpus_.free(rank_); }
  EngineScheme::Rank& rank() { return *world_.ranks_[static_cast<size_t>(rank_)]; }
  Traffic& traffic() { return world_.traffic[group_.kind]; }

  void start(Collective& c, Type type, Algorithm algorithm, Completion& done) {
    if (c.type != Type::kNone) throw std::logic_error("two of a kind at once on one control channel");
    c = {.type = type, .algorithm = algorithm, .done = &done, .number = ++number_};
    advance(c);
  }

  void happen(Time now, uint64_t what, void* with) override {
    if (what == kBatch) {
      rank().arrived.push_back({nullptr, nullptr, static_cast<Completion*>(with)});
      return rank().step_at(now);
    }
    world_.cpus_.take(rank_, now, world_.network_.receive);
    early_.push_back(static_cast<Packet*>(with));
    const uint64_t number = early_.back()->collective;
    for (Collective* c : {&round_, &order_})
      if (c->type != Type::kNone && c->number == number) advance(*c);
  }

  void advance(Collective& c) {
    const int steps = steps_of(c.algorithm, group_.size());
    if (c.step > steps) return;
    for (; c.step < steps; ++c.step, c.sent_this_step = false) {
      const Step s = step_of(c.algorithm, member_, group_.size(), c.step);
      if (s.send >= 0 && !std::exchange(c.sent_this_step, true)) send(c, s.send);
      if (s.receive >= 0 && !take(c, s.replace)) return;
    }
    ++c.step;  // over
    rank().arrived.push_back({this, &c, nullptr});
    rank().step_at(cpu());
  }

  size_t bytes(const Collective& c) const {
    if (c.type == Type::kRound) return sizeof(Record);
    if (c.type == Type::kOrder) return sizeof(uint64_t);
    return sizeof(TableEntry) * static_cast<size_t>(std::min(1 << c.step, group_.size() - (1 << c.step)));
  }

  void send(Collective& c, int member) {
    Packet* packet = world_.take_packet();
    packet->collective = c.number;
    packet->step = c.step;
    if (c.type == Type::kRound) copy_used(*record_, packet->record);
    if (c.type == Type::kOrder) packet->value = *value_;
    const int to = group_.members[static_cast<size_t>(member)];
    const Time left = world_.cpus_.take(rank_, cpu(), world_.network_.send);
    EngineChannel& peer = *world_.channels_[static_cast<size_t>(to)][group_.kind];
    world_.events_.at(left + world_.network_.under_way(rank_, to, bytes(c)), peer, 0, packet);
    ++c.sent;
    ++world_.handled_[static_cast<size_t>(rank_)];
    traffic().bytes += bytes(c);
  }

  // The message of this step, if it has come.
  bool take(Collective& c, bool replace) {
    const auto it = std::find_if(early_.begin(), early_.end(), [&](const Packet* packet) {
      return packet->collective == c.number && packet->step == c.step;
    });
    if (it == early_.end()) return false;
    Packet* packet = *it;
    early_.erase(it);
    if (c.type == Type::kRound) {
      if (replace) copy_used(packet->record, *record_);
      else combine(packet->record, *record_);
    } else if (c.type == Type::kOrder) {
      *value_ = replace ? packet->value : std::max(*value_, packet->value);
    }
    world_.give_packet(packet);
    ++c.received;
    ++world_.handled_[static_cast<size_t>(rank_)];
    return true;
  }

  void account(const Collective& c) {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    Traffic& t = traffic();
    EngineScheme::Shared& shared = world_.shared_[index()];
    if (c.type == Type::kRound) {
      t.rounds += member_ == 0 ? 1 : 0;
      ++t.members_in_rounds;
      t.round_messages += static_cast<uint64_t>(c.sent);
      t.most_sent = std::max(t.most_sent, c.sent);
      t.most_received = std::max(t.most_received, c.received);
      for (uint32_t i = 0; i < record_->agreed; ++i) world_.ledger_.agreed(group_, sequence_++, cpu());
    } else if (c.type == Type::kOrder) {
      t.orders += member_ == 0 ? 1 : 0;
      ++t.members_in_orders;
      t.order_messages += static_cast<uint64_t>(c.sent);
      auto& order = shared.orders.at(c.number);
      order.last_end = std::max(order.last_end, cpu());
      if (++order.ended < group_.size()) return;
      if (order.started != group_.size()) throw std::logic_error("a timestamp without all members");
      world_.second_phase[group_.kind].add(order.last_end - order.last_start);
      shared.orders.erase(c.number);
    } else {
      t.tables += member_ == 0 ? 1 : 0;
      t.table_messages += static_cast<uint64_t>(c.sent);
      ++sequence_;
      const auto& table = shared.tables.at(c.number);
      std::copy(table.begin(), table.end(), entries_);
      if (++shared.tables_read[c.number] < group_.size()) return;
      shared.tables.erase(c.number);
      shared.tables_read.erase(c.number);
    }
  }

  EngineScheme& world_;
  Group& group_;
  const int member_;
  const int rank_;
  Collective round_, order_;
  uint64_t number_ = 0;       // of this member's collectives: the same on all
  Record* record_ = nullptr;  // combined in place
  uint64_t* value_ = nullptr;
  TableEntry* entries_ = nullptr;
  uint64_t sequence_ = 0;       // of the next operation that no round has covered
  std::vector<Packet*> early_;  // received and not used yet
};

}  // namespace multicomm::scale
