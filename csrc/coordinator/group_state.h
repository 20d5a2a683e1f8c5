// One group's queue and rounds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/batch.h"
#include "coordinator/group_trace.h"
#include "coordinator/launch_order.h"
#include "coordinator/names.h"
#include "coordinator/operation.h"
#include "coordinator/record.h"
#include "coordinator/stall.h"
#include "transport/transport.h"

namespace multicomm {

class Coordinator;
enum class Standing : int;
struct GroupReport;

struct GroupInfo {
  std::string name;        // readable, for errors, statistics and traces
  std::vector<int> ranks;  // global ranks, in group order
  int rank = 0;            // this process, in group order
  int size() const { return static_cast<int>(ranks.size()); }
};

struct GroupStatistics {
  uint64_t operations = 0;
  uint64_t bytes = 0;
  uint64_t rounds = 0;
  uint64_t batches = 0;
  uint64_t batched_operations = 0;
  uint64_t inline_operations = 0;
  uint64_t point_to_point = 0;
};

// Everything below "driver" is owned by whoever holds the drive lock (see Driver); the queue has its own short lock, so
// that submission never waits for MPI.
class GroupState final : public PointToPointSink, public std::enable_shared_from_this<GroupState> {
 public:
  GroupState(Coordinator& coordinator, GroupInfo info);

  // --- any thread ---
  const GroupInfo& info() const { return info_; }
  // Queues the operations and numbers them, together. Returns those that the group does not take, and why.
  using Refused = std::vector<std::pair<OperationPtr, ErrorPtr>>;
  Refused enqueue(std::span<const OperationPtr> operations);
  uint64_t sequence() const { return next_sequence_.load(); }
  // For what is not an operation of its own, but is called in the order of those on all members.
  uint64_t take_number();
  GroupStatistics statistics() const;
  ErrorPtr failure() const;
  bool closed() const { return closed_.load(); }
  bool busy() const { return unfinished_.load() > 0; }  // has operations that are not done
  // Was given up while a device had work of it, or was to have: its members' transports may wait for each other for
  // ever.
  bool device_given_up() const { return device_given_up_.load(); }
  std::atomic<bool> in_inbox{false};
  uint64_t number() const { return number_; }  // among the groups of this process
  std::string describe() const;                // "group 'name' (ranks [0, 2])"

  // --- driver ---
  void connect(std::shared_ptr<Channel> channel);
  void not_made(ErrorPtr error);  // the channel will never come
  void advance();                 // takes submissions, posts point-to-point, starts a round if one is due
  void leave();
  bool leaving() const { return leaving_; }
  // Gives the group up: everything unfinished fails with `error`, and so does what comes later. Peers that still count
  // on offered operations get their real input.
  // `device_goes_on`: what all members' devices have been given comes to its end by itself.
  void give_up(ErrorPtr error, bool device_goes_on = false);
  void check_deadlines(Operation::Clock::time_point now);
  // Also for what waits already.
  void set_timeout(std::chrono::milliseconds timeout);
  uint64_t identity() const { return channel_ ? channel_->identity() : 0; }  // 0: not made yet
  OperationPtr oldest_unfinished() const;
  bool waits_for(uint64_t name) const;  // see name_of
  bool joining() const;                 // has called join, and others have not
  bool joined() const;                  // and has nothing of its own left: takes part in what the others do
  GroupReport report(Operation::Clock::time_point now) const;
  void answered(int global_rank, const Answer& answer);
  void trace_unfinished();  // tells the trace, which ends, of what is not over
  void told(const Notice& notice);
  // Gives up one point-to-point operation for which its caller no longer waits; the group goes on.
  void withdraw(const OperationPtr& operation);
  void point_to_point_done(const OperationPtr& operation, const ErrorPtr& error) override;
  uint64_t message_matched(const OperationPtr& operation, uint64_t number) override;
  void message_ordered(OperationPtr operation, uint64_t timestamp) override;
  std::shared_ptr<Channel> release_channel();

 private:
  struct RoundDone final : Completion {
    GroupState* group = nullptr;
    void complete(const std::string* error) override { group->on_round(error); }
  };
  struct TableDone final : Completion {
    GroupState* group = nullptr;
    void complete(const std::string* error) override { group->on_table(error); }
  };
  struct OrderDone final : Completion {
    GroupState* group = nullptr;
    void complete(const std::string* error) override { group->on_order(error); }
  };
  struct BatchInFlight final : Completion {
    GroupState* group = nullptr;
    Batch batch;
    std::list<BatchInFlight>::iterator self;
    void launched() override { group->on_launched(*this); }
    void complete(const std::string* error) override { group->on_batch(*this, error); }
  };

  // The device batches of one round, or one message: launched together, when their turn has come.
  struct Unit {
    std::vector<BatchInFlight*> flights;
    LaunchOrder::Place place;
  };
  using UnitPlace = std::list<Unit>::iterator;
  // What a round's result asks for before the next round may start: why its first operation does not fit, the sizes of
  // what it gathers, or what the members move device tensors with.
  enum class Table : uint8_t { kNone, kDisagreement, kSizes, kDevices };

  // An operation that waits: the oldest collective and the oldest message are looked at.
  struct Waiting {
    OperationPtr operation;
    bool agreed = false;
  };
  template <typename Use>
  void for_unfinished(Use use) const;
  Standing standing_of(const Waiting& waiting) const;
  std::string reason_of(const Waiting& waiting);
  void inspect(const Waiting& waiting, Operation::Clock::time_point now);
  Stall& stall_of(const Operation& operation) { return stalls_[is_point_to_point(operation.descriptor.kind) ? 1 : 0]; }
  void take_submissions();
  void wait_by_name(const OperationPtr& operation);
  ErrorPtr take(const OperationPtr& operation);
  void post_point_to_point();
  bool enter(const OperationPtr& operation);
  uint64_t fill_record();
  static bool same_run(const Descriptor& a, const Descriptor& b);
  void offer_pending();
  void drop_hopeless();
  void start_round();
  void on_round(const std::string* error);
  uint32_t covered_prefix();
  bool as_joined() const { return mine_.active == 0; }  // what this rank was in the last round
  std::vector<OperationPtr> take_covered(uint32_t count);
  OperationPtr stand_in_for(const Descriptor& descriptor) const;
  int contributors() const {
    return result_.active < static_cast<uint32_t>(info_.size()) ? static_cast<int>(result_.active) : 0;
  }
  std::string text_for_others() const;
  std::vector<OperationPtr> take_names();
  void pace_rounds(bool progress);
  void all_joined();
  void end_join();
  OperationPtr asked_about() const { return stand_in_ ? stand_in_ : pending_.front(); }
  OperationPtr take_asked_about();
  void follow_up();
  // What the last round asks for is not started, or not over where the next round depends on it.
  bool round_busy() const { return round_active_ || order_due_ || table_ != Table::kNone; }
  void start_order();
  void on_order(const std::string* error);
  UnitPlace propose(std::vector<BatchInFlight*> flights, uint64_t number);
  void decide(UnitPlace unit, uint64_t timestamp);
  void launch_unit(UnitPlace unit);
  void heed_notice();
  void stop_device();
  static bool launched(const BatchInFlight& flight) { return flight.batch.operations.front()->launched(); }
  void drop_unlaunched();
  void stop_following_up();
  void tell_peers();
  void start_table(const std::string& mine);
  void start_table();  // of my_entry_
  void on_table(const std::string* error);
  void on_piece_sizes(const std::vector<TableEntry>& entries);
  void on_devices(const std::vector<TableEntry>& entries);
  bool introduction_due(const Descriptor& descriptor) const;
  void on_launched(BatchInFlight& flight);
  BatchInFlight& new_flight(Batch batch);
  void on_batch(BatchInFlight& flight, const std::string* error);
  void end(BatchInFlight& flight, const ErrorPtr& error);
  void strand(BatchInFlight& flight);
  size_t finish_inline(std::span<const OperationPtr> operations);
  void launch_batches(const std::vector<OperationPtr>& operations);
  void launch(BatchInFlight& flight, bool more = false);
  void react_to_members();
  void close_if_over();
  void close();
  void settle(const OperationPtr& operation, ErrorPtr error);
  void abandon(const OperationPtr& operation, const ErrorPtr& error);
  void fail_pending(const ErrorPtr& error);
  void warn_of_launched(const OperationError& error);
  void broken(const std::string& what);
  void explain_broken(Operation::Clock::time_point now);
  template <typename Start>
  void guarded(Start start);

  Coordinator& coordinator_;
  const GroupInfo info_;
  const uint64_t number_;

  mutable std::mutex queue_mutex_;
  std::vector<OperationPtr> queue_;  // guarded by queue_mutex_
  ErrorPtr failure_;                 // guarded by queue_mutex_
  GroupStatistics statistics_;       // guarded by queue_mutex_
  std::atomic<uint64_t> next_sequence_{0};
  uint64_t next_message_ = 0;  // guarded by queue_mutex_; numbers point-to-point operations apart
  uint64_t next_named_ = 0;    // guarded by queue_mutex_; and named ones
  std::atomic<bool> closed_{false};
  std::atomic<bool> device_given_up_{false};
  std::atomic<int64_t> unfinished_{0};

  // Driver.
  std::shared_ptr<Channel> channel_;
  std::deque<OperationPtr> pending_;  // collectives that no finished round has covered, in order
  NamedOperations names_;             // collectives with a name, until every member has submitted them
  // At the front of every member's pending_ (but not where it has joined): those that every member has submitted.
  std::deque<NamedOperations::Match> moved_;
  std::deque<OperationPtr> messages_;          // point-to-point operations not yet posted
  std::vector<OperationPtr> posted_messages_;  // in the data plane's hands
  std::list<BatchInFlight> batches_;
  std::vector<OperationPtr> taken_;  // reused by take_submissions
  uint64_t next_batch_ = 0;
  std::vector<BatchInFlight*> unordered_;  // device batches of the last round, not proposed yet
  std::list<Unit> units_;                  // proposed and not launched
  UnitPlace ordering_;                     // the one whose second phase is in flight, while proposed_
  uint64_t next_unit_ = 0;
  bool round_active_ = false;   // a round or its table is in flight
  bool order_due_ = false;      // the second phase of the last round is to be started
  bool order_active_ = false;   // a second phase is in flight
  Table table_ = Table::kNone;  // due after the last round, or in flight
  bool leaving_ = false;
  bool creation_failed_ = false;
  bool all_left_ = false;
  bool proposed_ = false;        // ordering_ is waiting for its timestamp
  bool device_stopped_ = false;  // the group was given up: no device batch is launched any more
  bool peers_told_ = false;
  int given_up_by_ = -1;  // global rank of a member that has said so, outside the rounds
  std::string given_up_why_;
  Operation::Clock::time_point given_up_since_;
  bool broken_ = false;     // the transport failed: nothing more is started
  std::string broken_why_;  // until it is known whether a member has died
  Operation::Clock::time_point broken_since_{};
  std::vector<OperationPtr> stranded_;  // of failed batches, until then
  bool announce_failure_ = false;       // peers have not been told yet that this rank gave the group up
  bool waits_for_memory_ = false;
  // A round in which nothing came together is not repeated at once, unless there is something new to offer.
  bool no_progress_ = false;
  uint64_t last_offer_ = 0;
  Operation::Clock::time_point waiting_since_{};
  bool learned_ = false;    // the last round gave names to this group, for nothing that waits
  bool asks_next_ = false;  // the last round left something that needs the next one's head
  Operation::Clock::time_point round_due_{};
  Operation::Clock::time_point resting_until_{};  // then the coordinator makes this group ready
  Operation::Clock::duration join_allowance_{};   // a join waits for so long since the last round
  bool all_joined_ = false;
  OperationPtr stand_in_;  // what a table is about, on a rank that has joined
  OperationPtr join_;      // this rank's last one: makes what stands in for it on devices
  ErrorPtr preparation_failed_;
  GroupTrace trace_;
  Stall stalls_[2] = {Stall(0), Stall(1)};  // of collectives, of messages
  Record mine_;
  Record result_;
  TableEntry my_entry_{};
  std::vector<TableEntry> entries_;  // while a table is in flight
  uint64_t my_proposal_ = 0;
  uint64_t timestamp_ = 0;
  RoundDone round_done_;
  TableDone table_done_;
  OrderDone order_done_;
};
using GroupPtr = std::shared_ptr<GroupState>;

// A transport that refuses to start something breaks this group, not the process.
template <typename Start>
void GroupState::guarded(Start start) {
  try {
    start();
  } catch (const std::runtime_error& error) {
    broken(error.what());
  } catch (const std::bad_alloc&) {
    broken("no memory for a buffer");
  }
}

// Calls use(operation, agreed) for what no caller has been told the end of.
template <typename Use>
void GroupState::for_unfinished(Use use) const {
  const auto each = [&](const auto& operations, bool agreed) {
    for (const OperationPtr& operation : operations)
      if (!operation->abandoned) use(operation, agreed);
  };
  for (const BatchInFlight& flight : batches_) each(flight.batch.operations, true);
  each(stranded_, true);
  each(pending_, false);
  names_.for_each([&](const OperationPtr& operation) {
    if (!operation->abandoned) use(operation, false);
  });
  each(messages_, false);
  each(posted_messages_, false);
}

}  // namespace multicomm
