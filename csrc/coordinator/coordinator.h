// The engine: all groups of one process as one state machine. It has no thread, no clock and no transport of its own;
// Driver runs it in production, the simulation runs many of them in one thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "coordinator/group_state.h"
#include "coordinator/launch_order.h"
#include "coordinator/overlap_guard.h"
#include "coordinator/picture.h"
#include "coordinator/settings.h"
#include "coordinator/trace.h"
#include "transport/transport.h"

namespace multicomm {

// Takes over operations that are done, with the engine's reference to them: the driver never releases a tensor and
// never runs a callback.
class CompletionSink {
 public:
  virtual void completed(OperationPtr operation) = 0;
  // It is in the queue of its device, and completed() follows.
  virtual void launched(const OperationPtr&) {}

 protected:
  ~CompletionSink() = default;
};

class Coordinator final : public InquirySink {
 public:
  using Clock = Operation::Clock;

  Coordinator(Settings settings, Progress& progress, CompletionSink& sink);

  // What a rank did before its end, or before it gave a group up, may still be on its way for so long.
  static constexpr std::chrono::milliseconds kGrace{1000};

  // --- any thread ---
  const Settings& settings() const { return settings_; }
  GroupPtr add_group(GroupInfo info);
  // The operation is done at once, with an error, if the group takes no more.
  void submit(const GroupPtr& group, OperationPtr operation) { submit(group, std::span(&operation, 1)); }
  // Together: the driver takes all of them or none.
  void submit(const GroupPtr& group, std::span<const OperationPtr> operations);
  // Runs `task` on the driver at its next step.
  void post(std::function<void()> task);
  bool has_inbox() const { return inbox_flag_.load(std::memory_order_acquire); }
  uint64_t unfinished() const { return unfinished_.load(std::memory_order_relaxed); }
  std::vector<GroupPtr> groups() const;

  // Told what happens from the driver's next step on; null: nobody. It must outlive the engine.
  void set_trace(Trace* trace) { trace_.store(trace, std::memory_order_release); }
  Trace* trace() const { return trace_.load(std::memory_order_acquire); }
  uint64_t next_group() { return group_count_.fetch_add(1); }

  OverlapGuard& memory() { return memory_; }
  LaunchOrder& launch_order() { return launch_order_; }  // driver
  // Prints a warning; replaceable, for tests.
  std::function<void(const std::string&)> warn;

  // --- driver ---
  // One step: polls the transport, takes submissions, starts what is due. Returns whether anything moved.
  bool step(Clock::time_point now);
  // Whether somebody could still be waiting for something that a step brings forward.
  bool active() const;
  void wait_for_memory(GroupState& group);  // made ready when some operation lets its memory go
  void make_ready(GroupState& group);
  // Made ready again at that time.
  void look_again(GroupState& group, Clock::time_point at);
  Clock::time_point step_time() const { return step_time_; }
  // Publishes the result and passes the operation on. `operation` may already be done (given up): then only its memory
  // is let go.
  void settle(OperationPtr operation, ErrorPtr error);
  // An operation that is over may have its last reference here, which the driver must not release.
  void let_go(OperationPtr operation) { sink_.completed(std::move(operation)); }
  // Publishes that the operation is in its device's queue: what comes after it on the same memory is behind it there.
  void launched(const OperationPtr& operation);
  // Publishes the error while the engine still needs the operation's tensors.
  void abandon(const OperationPtr& operation, ErrorPtr error);
  void close(GroupState& group);
  void set_inquiries(InquiryPlane* plane) { inquiries_ = plane; }
  InquiryPlane* inquiries() { return inquiries_; }  // null where nobody can be asked
  // A member that has been known to be dead for that long, or -1.
  int dead_member(const GroupInfo& info, std::chrono::milliseconds since) const;
  // What a member that has given the group up has said of it, maybe before this rank had it; or null.
  const Notice* notice_of(uint64_t group) const;
  Clock::time_point checked_at() const { return now_; }
  Answer answer(const Inquiry& inquiry) override;
  void answered(int global_rank, const Answer& answer) override;
  void told(const Notice& notice) override;
  Pictures& pictures() { return pictures_; }
  void report_asked(int asker, const ReportInquiry& inquiry) override { pictures_.asked(asker, inquiry); }
  void report_came(int rank, uint64_t number, const std::string& report) override {
    pictures_.came(rank, number, report);
  }

  // Called by the driver when a group's members have all left; takes the channel to be freed.
  std::function<void(std::shared_ptr<Channel>)> on_channel_released;

 private:
  void drain_inbox();
  void drain_ready();

  const Settings settings_;
  Progress& progress_;
  CompletionSink& sink_;

  mutable std::mutex inbox_mutex_;
  std::vector<GroupPtr> inbox_groups_;              // guarded by inbox_mutex_
  std::vector<std::function<void()>> inbox_tasks_;  // guarded by inbox_mutex_
  std::vector<GroupPtr> groups_;                    // guarded by inbox_mutex_
  std::atomic<bool> inbox_flag_{false};
  std::atomic<uint64_t> unfinished_{0};
  std::atomic<Trace*> trace_{nullptr};
  std::atomic<uint64_t> group_count_{0};

  OverlapGuard memory_;

  // Driver.
  LaunchOrder launch_order_;
  InquiryPlane* inquiries_ = nullptr;
  Pictures pictures_{*this};
  std::map<int, Clock::time_point> deaths_;  // global rank; when it was learned
  std::deque<Notice> notices_;
  std::vector<GroupPtr> ready_;
  std::vector<GroupPtr> drained_groups_;
  std::vector<std::function<void()>> drained_tasks_;
  std::vector<GroupPtr> memory_waiters_;
  struct Pause {
    GroupPtr group;
    Clock::time_point until;
  };
  std::vector<Pause> pauses_;
  std::vector<GroupPtr> closed_;  // until the end of the step
  bool memory_freed_ = false;
  Clock::time_point next_deadline_check_{};
  Clock::time_point now_{};  // of the last check
  Clock::time_point step_time_{};
};

}  // namespace multicomm
