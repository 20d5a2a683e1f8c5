// Simulated ranks in one process: each runs the real coordinator; the network is a list of deliveries from which a
// seeded scheduler picks. No threads and no real time, so a seed replays exactly.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
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

// What members started together although it does not belong together: MPI would exchange garbage in silence. A logic
// error, so that the engine does not take it for a failing transport.
struct OrderViolation : std::logic_error {
  using std::logic_error::logic_error;
};

struct SimGroup;
struct Rendezvous;

class SimWorld {
 public:
  SimWorld(uint64_t seed, const std::vector<Settings>& settings);  // one rank per entry
  ~SimWorld();

  int size() const { return static_cast<int>(ranks_.size()); }
  Random& random() { return random_; }
  Coordinator& coordinator(int rank) { return ranks_[static_cast<size_t>(rank)]->coordinator; }

  // One handle per member, in group order.
  std::vector<GroupPtr> make_group(const std::string& name, const std::vector<int>& members);
  // The same in steps: each member joins when its program makes the group; the communicators come once all have.
  SimGroup& begin_group(const std::string& name, const std::vector<int>& members);
  GroupPtr join_group(SimGroup& group, int member);

  // For tests with real threads: deliveries are made at once, and finished operations go to `sink` (null: finalized in
  // place).
  void deliver_at_once() { at_once_ = true; }
  void set_sink(int rank, CompletionSink* sink) { ranks_[static_cast<size_t>(rank)]->sink = sink; }

  bool step(int rank);  // one step of the rank's coordinator
  bool deliver_one();   // hands one pending completion, chosen at random, to its rank
  bool quiet() const;   // nothing is under way
  void advance_time(std::chrono::microseconds by) { now_ += by; }
  Operation::Clock::time_point now() const { return now_; }
  // Batches that a rank's device has been given and has not done.
  size_t on_device(int rank) const { return ranks_[static_cast<size_t>(rank)]->stream.size(); }

  void set_dead(int rank) { dead_.insert(rank); }                         // as far as the others know
  void set_deaf(int rank) { deaf_.insert(rank); }                         // answers nobody
  void break_batches(const std::string& error) { batch_error_ = error; }  // of all that complete from now on
  // The rank's process is gone: it starts and receives nothing more, and some of what it had a part in is lost on the
  // way to others.
  void cut_off(int rank);
  // Told of every delivery, where a schedule is wanted.
  std::function<void(const std::string&)> note;

 private:
  friend class SimChannel;
  friend class SimDevice;

  // A device: runs what it is given one after the other, and each for as long as a member has not come to it.
  struct OnDevice {
    SimGroup* group;
    Rendezvous* meeting;
    size_t place;            // in it
    std::vector<int> ranks;  // by place
    Batch* batch;
    Completion* done;
    std::shared_ptr<bool> told;  // its caller, that it is launched
    bool begun = false;
  };
  struct Rank final : Progress, CompletionSink, InquiryPlane {
    Rank(SimWorld& world, Settings settings, int number)
        : coordinator(std::move(settings), *this, *this), world(world), number(number) {
      coordinator.set_inquiries(this);
    }
    void ask(int global_rank, const Inquiry& inquiry) override;
    void tell(int global_rank, const Notice& notice) override;
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
    std::deque<OnDevice> stream;
    int buffers_in_use = 0;                           // by batches in flight
    std::deque<std::function<void()>> wait_for_room;  // of the planted fault kLaunchWaits
  };
  struct Delivery {
    int rank;
    std::function<void()> completion;
    const SimGroup* group;  // null: not a group's
    bool to_device;         // happens on the device, not in the rank's driver
  };
  void schedule(int rank, std::function<void()> completion, const SimGroup* group, bool to_device = false);
  void device_step(int rank);  // its head begins, if it has not
  void give_buffer(int rank);
  Rank& rank(int number) { return *ranks_[static_cast<size_t>(number)]; }

  std::mutex mutex_;  // owns the network: communicators and deliveries
  bool at_once_ = false;
  Random random_;
  std::vector<std::unique_ptr<SimGroup>> groups_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // after the groups, whose channels they hold
  std::vector<Delivery> under_way_;
  std::set<int> dead_;
  std::set<int> deaf_;
  std::set<int> cut_off_;
  std::string batch_error_;
  Operation::Clock::time_point now_{};
};

// A plain host array as an operation.
class PlainOperation : public Operation {
 public:
  std::string describe() const override;
};

// Makes `operation` an all_reduce in place of `values`, which must outlive it.
void make_all_reduce(Operation& operation, std::vector<int64_t>& values, ReduceOp op = ReduceOp::kSum);

// Gathers one text of every member.
class VariableGather : public PlainOperation {
 public:
  explicit VariableGather(std::string text);
  void set_piece_sizes(const std::vector<int64_t>& sizes) override;
  std::vector<std::string> pieces;  // by group rank, once done

 private:
  std::string own_;
};

}  // namespace multicomm::sim
