// The engine itself under simulated ranks: the real Coordinator, GroupState, Record and launch order of every rank,
// over a transport in virtual time that carries each collective message by message.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "coordinator/coordinator.h"
#include "workload.h"

namespace multicomm::scale {

class EngineChannel;

// What was sent and received on control channels, by kind of group.
struct Traffic {
  uint64_t rounds = 0, orders = 0, tables = 0;  // of all groups
  uint64_t round_messages = 0, order_messages = 0, table_messages = 0;
  uint64_t bytes = 0;
  uint64_t members_in_rounds = 0, members_in_orders = 0;  // how often a member took part
  int most_sent = 0, most_received = 0;                   // by one member in one round
};

class EngineScheme final : public Scheme {
 public:
  EngineScheme(Mesh& mesh, Events& events, const Network& network, const Settings& settings, Algorithm algorithm,
               Ledger& ledger, DataModel& data, Programs& programs);
  ~EngineScheme();

  void submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) override;
  // One look of every rank's driver, as an idle coordinator thread takes it.
  void look(Time now);
  // Makes one member of the group ask for something else than the others; true if all of them are told.
  bool disagree(const Group& group, Time now);

  uint64_t messages() const;
  uint64_t busiest() const { return *std::max_element(handled_.begin(), handled_.end()); }
  uint64_t engine_steps() const { return engine_steps_; }
  std::array<Traffic, kKinds> traffic{};
  std::array<Samples, kKinds> second_phase;  // from when the last member has started it

 private:
  friend class EngineChannel;

  struct Rank final : Progress, CompletionSink, Handler {
    Rank(EngineScheme& scheme, const Settings& settings, int number);
    size_t poll() override;
    void completed(OperationPtr operation) override;
    void happen(Time now, uint64_t, void*) override;  // a step
    void step_at(Time time);
    EngineScheme& scheme;
    const int number;
    bool step_due = false;
    struct Arrival {
      EngineChannel* channel;  // null: a batch
      void* collective;        // of that channel
      Completion* batch;
    };
    std::vector<Arrival> arrived, taken;
    std::array<GroupPtr, kKinds> groups;
    std::unique_ptr<Coordinator> coordinator;
  };

  // A message under way. The value, or the record, or nothing (tables are read where they were written).
  struct Packet {
    uint64_t collective;
    int step;
    uint64_t value;
    Record record;
  };
  Packet* take_packet();
  void give_packet(Packet* packet) { free_packets_.push_back(packet); }

  // The second phases and tables of a group that some members have started.
  struct Orders {
    int started = 0, ended = 0;
    Time last_start = 0, last_end = 0;
  };
  struct Shared {
    std::unordered_map<uint64_t, Orders> orders;  // by number of the collective
    std::unordered_map<uint64_t, std::vector<TableEntry>> tables;
    std::unordered_map<uint64_t, int> tables_read;
  };

  Mesh& mesh_;
  Events& events_;
  const Network network_;
  const Algorithm algorithm_;
  Ledger& ledger_;
  DataModel& data_;
  Programs& programs_;
  Cpus cpus_;
  std::vector<Shared> shared_;  // by group
  std::vector<std::unique_ptr<Packet>> packets_;
  std::vector<Packet*> free_packets_;
  std::vector<std::array<EngineChannel*, kKinds>> channels_;  // by rank; owned by the engine's groups
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<uint64_t> handled_;  // messages that each rank sent or received
  uint64_t engine_steps_ = 0;
  int disagreements_ = 0;  // that members were told of
};

}  // namespace multicomm::scale
