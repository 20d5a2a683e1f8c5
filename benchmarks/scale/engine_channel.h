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
class EngineChannel final : public Channel, ControlPlane, DevicePlane, Handler {
 public:
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
    start(Type::kRound, world_.algorithm_, done);
  }

  void start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    maximum = mine;
    value_ = &maximum;
    auto& order = world_.shared_[index()].orders[number_ + 1];
    ++order.started;
    order.last_start = std::max(order.last_start, cpu());
    start(Type::kOrder, world_.algorithm_, done);
  }

  void start_table(const TableEntry& mine, TableEntry* all, Completion& done) override {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    auto& table = world_.shared_[index()].tables[number_ + 1];
    table.resize(group_.members.size());
    table[static_cast<size_t>(member_)] = mine;
    entries_ = all;
    start(Type::kTable, Algorithm::kBruck, done);
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
  void post(const OperationPtr&) override { throw std::logic_error("no point-to-point here"); }
  void abort() override {}

  // The rank's driver has seen that the collective is over.
  void report() {
    const Type type = std::exchange(type_, Type::kNone);
    account(type);
    done_->complete(nullptr);
  }

 private:
  enum class Type : uint8_t { kNone, kRound, kOrder, kTable };
  static constexpr uint64_t kBatch = 1;
  using Packet = EngineScheme::Packet;

  size_t index() const { return static_cast<size_t>(group_.number); }
  Time cpu() const { return world_.cpus_.free(rank_); }
  EngineScheme::Rank& rank() { return *world_.ranks_[static_cast<size_t>(rank_)]; }
  Traffic& traffic() { return world_.traffic[group_.kind]; }

  void start(Type type, Algorithm algorithm, Completion& done) {
    if (type_ != Type::kNone) throw std::logic_error("two collectives at once on one control channel");
    type_ = type;
    algorithm_ = algorithm;
    done_ = &done;
    ++number_;
    step_ = sent_ = received_ = 0;
    sent_this_step_ = false;
    advance();
  }

  void happen(Time now, uint64_t what, void* with) override {
    if (what == kBatch) {
      rank().arrived.push_back({nullptr, static_cast<Completion*>(with)});
      return rank().step_at(now);
    }
    world_.cpus_.take(rank_, now, world_.network_.receive);
    early_.push_back(static_cast<Packet*>(with));
    if (type_ != Type::kNone) advance();
  }

  void advance() {
    const int steps = steps_of(algorithm_, group_.size());
    if (step_ > steps) return;
    for (; step_ < steps; ++step_, sent_this_step_ = false) {
      const Step s = step_of(algorithm_, member_, group_.size(), step_);
      if (s.send >= 0 && !std::exchange(sent_this_step_, true)) send(s.send);
      if (s.receive >= 0 && !take(s.replace)) return;
    }
    ++step_;  // over
    rank().arrived.push_back({this, nullptr});
    rank().step_at(cpu());
  }

  size_t bytes() const {
    if (type_ == Type::kRound) return sizeof(Record);
    if (type_ == Type::kOrder) return sizeof(uint64_t);
    return sizeof(TableEntry) * static_cast<size_t>(std::min(1 << step_, group_.size() - (1 << step_)));
  }

  void send(int member) {
    Packet* packet = world_.take_packet();
    packet->collective = number_;
    packet->step = step_;
    if (type_ == Type::kRound) copy_used(*record_, packet->record);
    if (type_ == Type::kOrder) packet->value = *value_;
    const int to = group_.members[static_cast<size_t>(member)];
    const Time left = world_.cpus_.take(rank_, cpu(), world_.network_.send);
    EngineChannel& peer = *world_.channels_[static_cast<size_t>(to)][group_.kind];
    world_.events_.at(left + world_.network_.under_way(rank_, to, bytes()), peer, 0, packet);
    ++sent_;
    ++world_.handled_[static_cast<size_t>(rank_)];
    traffic().bytes += bytes();
  }

  // The message of this step, if it has come.
  bool take(bool replace) {
    const auto it = std::find_if(early_.begin(), early_.end(), [&](const Packet* packet) {
      return packet->collective == number_ && packet->step == step_;
    });
    if (it == early_.end()) return false;
    Packet* packet = *it;
    early_.erase(it);
    if (type_ == Type::kRound) {
      if (replace) copy_used(packet->record, *record_);
      else combine(packet->record, *record_);
    } else if (type_ == Type::kOrder) {
      *value_ = replace ? packet->value : std::max(*value_, packet->value);
    }
    world_.give_packet(packet);
    ++received_;
    ++world_.handled_[static_cast<size_t>(rank_)];
    return true;
  }

  void account(Type type) {
    const MemoryCount::Scope scope(MemoryCount::kSimulation);
    Traffic& t = traffic();
    EngineScheme::Shared& shared = world_.shared_[index()];
    if (type == Type::kRound) {
      t.rounds += member_ == 0 ? 1 : 0;
      ++t.members_in_rounds;
      t.round_messages += static_cast<uint64_t>(sent_);
      t.most_sent = std::max(t.most_sent, sent_);
      t.most_received = std::max(t.most_received, received_);
      for (uint32_t i = 0; i < record_->agreed; ++i) world_.ledger_.agreed(group_, sequence_++, cpu());
    } else if (type == Type::kOrder) {
      t.orders += member_ == 0 ? 1 : 0;
      ++t.members_in_orders;
      t.order_messages += static_cast<uint64_t>(sent_);
      auto& order = shared.orders.at(number_);
      order.last_end = std::max(order.last_end, cpu());
      if (++order.ended < group_.size()) return;
      if (order.started != group_.size()) throw std::logic_error("a timestamp without all members");
      world_.second_phase[group_.kind].add(order.last_end - order.last_start);
      shared.orders.erase(number_);
    } else {
      t.tables += member_ == 0 ? 1 : 0;
      t.table_messages += static_cast<uint64_t>(sent_);
      ++sequence_;
      const auto& table = shared.tables.at(number_);
      std::copy(table.begin(), table.end(), entries_);
      if (++shared.tables_read[number_] < group_.size()) return;
      shared.tables.erase(number_);
      shared.tables_read.erase(number_);
    }
  }

  EngineScheme& world_;
  Group& group_;
  const int member_;
  const int rank_;
  Type type_ = Type::kNone;
  Algorithm algorithm_ = Algorithm::kDoubling;
  Completion* done_ = nullptr;
  uint64_t number_ = 0;  // of this member's collectives: the same on all
  int step_ = 0;
  bool sent_this_step_ = false;
  int sent_ = 0, received_ = 0;
  Record* record_ = nullptr;  // combined in place
  uint64_t* value_ = nullptr;
  TableEntry* entries_ = nullptr;
  uint64_t sequence_ = 0;       // of the next operation that no round has covered
  std::vector<Packet*> early_;  // received and not used yet
};

}  // namespace multicomm::scale
