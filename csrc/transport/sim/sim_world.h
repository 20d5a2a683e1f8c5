// Simulated ranks in one process: each runs the real coordinator; the network is a list of deliveries from which a
// seeded scheduler picks. No threads and no real time, so a seed replays exactly.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "coordinator/coordinator.h"

namespace multicomm::sim {

using Random = std::mt19937_64;

// One collective of one communicator: the i-th start on every member belongs together, whatever it is, as in MPI.
struct Rendezvous {
  std::vector<std::function<void()>> deliver;  // per member that has started, completes it
  std::vector<const Record*> records;
  std::vector<Record*> record_results;
  std::vector<const TableEntry*> entries;
  std::vector<TableEntry*> table_results;
  std::vector<Batch*> batches;
  size_t started = 0;
};

class SimWorld;

// One communicator with the same members as the group.
struct SimCommunicator {
  SimWorld* world = nullptr;
  int size = 0;
  std::deque<Rendezvous> open;
  uint64_t first_open = 0;       // number of open.front()
  std::vector<uint64_t> next;    // per member, the number of its next start
  Rendezvous& join(int member);  // the member's next collective
};

// What members started together although it does not belong together: MPI would exchange garbage in silence. A logic
// error, so that the engine does not take it for a failing transport.
struct OrderViolation : std::logic_error {
  using std::logic_error::logic_error;
};

class SimWorld {
 public:
  SimWorld(uint64_t seed, const std::vector<Settings>& settings);  // one rank per entry
  ~SimWorld();

  int size() const { return static_cast<int>(ranks_.size()); }
  Random& random() { return random_; }
  Coordinator& coordinator(int rank) { return ranks_[static_cast<size_t>(rank)]->coordinator; }
  // One handle per member, in group order; connected at once, or by connect().
  std::vector<GroupPtr> make_group(const std::string& name, const std::vector<int>& members);

  // For tests with real threads: deliveries are made at once, and finished operations go to `sink` (null: finalized in
  // place).
  void deliver_at_once() { at_once_ = true; }
  void set_sink(int rank, CompletionSink* sink) { ranks_[static_cast<size_t>(rank)]->sink = sink; }

  bool step(int rank);  // one step of the rank's coordinator
  bool deliver_one();   // hands one pending completion, chosen at random, to its rank
  bool quiet() const;   // nothing is under way
  void advance_time(std::chrono::milliseconds by) { now_ += by; }
  Operation::Clock::time_point now() const { return now_; }
  std::string trace() const;  // the last events, for a failing seed
  void note(const std::string& event);

  void set_dead(int rank) { dead_.insert(rank); }  // as far as the others know
  void set_deaf(int rank) { deaf_.insert(rank); }  // answers nobody

  // For the communicators.
  void schedule(int rank, std::function<void()> completion);
  std::mutex& mutex() { return mutex_; }

 private:
  struct Rank final : Progress, CompletionSink, InquiryPlane {
    Rank(SimWorld& world, Settings settings, int number)
        : coordinator(std::move(settings), *this, *this), world(world), number(number) {
      coordinator.set_inquiries(this);
    }
    void ask(int global_rank, const Inquiry& inquiry) override;
    void ask_report(int global_rank, const ReportInquiry& inquiry) override;
    void send_report(int global_rank, uint64_t report_number, const std::string& report) override;
    int rank() const override { return number; }
    int size() const override { return world.size(); }
    std::string place_of(int) const override { return {}; }
    std::string seen_of(int) const override { return {}; }
    std::vector<int> dead_ranks() const override { return {world.dead_.begin(), world.dead_.end()}; }
    size_t poll() override;
    void look() override {}  // what is asked arrives with everything else
    void completed(OperationPtr operation) override;
    Coordinator coordinator;
    SimWorld& world;
    const int number;
    std::deque<std::function<void()>> arrived;  // delivered, not yet polled; guarded by the world's mutex
    CompletionSink* sink = nullptr;
  };
  struct Delivery {
    int rank;
    std::function<void()> completion;
  };

  std::mutex mutex_;  // owns the network: communicators and deliveries
  bool at_once_ = false;
  Random random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<SimCommunicator>> communicators_;
  std::vector<Delivery> under_way_;
  std::set<int> dead_;
  std::set<int> deaf_;
  Operation::Clock::time_point now_{};
  std::deque<std::string> events_;
};

// A plain host array as an operation.
class PlainOperation : public Operation {
 public:
  std::string describe() const override;
};

// Makes `operation` an all_reduce in place of `values`, which must outlive it.
void make_all_reduce(Operation& operation, std::vector<int64_t>& values, ReduceOp op = ReduceOp::kSum);

// Gathers one text of every member.
class VariableGather final : public PlainOperation {
 public:
  explicit VariableGather(std::string text);
  void set_piece_sizes(const std::vector<int64_t>& sizes) override;
  std::vector<std::string> pieces;  // by group rank, once done

 private:
  std::string own_;
};

}  // namespace multicomm::sim
