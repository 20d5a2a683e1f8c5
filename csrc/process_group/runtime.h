// The one engine of the process, shared by all groups.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/completion_queue.h"
#include "coordinator/coordinator.h"
#include "coordinator/driver.h"
#include "process_group/inspection.h"
#include "timeline/timeline.h"
#include "transport/device/launcher.h"
#include "transport/mpi/group_maker.h"
#include "transport/mpi/inquiries.h"

namespace multicomm {

class Runtime {
 public:
  // Made on first use; never destroyed, since other threads may be inside it when the process ends. Throws in a forked
  // child.
  static Runtime& get();
  static Runtime* if_made();

  const Settings& settings() const { return coordinator_.settings(); }
  Coordinator& coordinator() { return coordinator_; }
  Driver& driver() { return driver_; }

  // A group whose communicator is made in the background.
  GroupPtr make_group(GroupInfo info, mpi::GroupRequest request);
  // Starts MPI without a group.
  void start(bootstrap::WorldRequest request);
  // Waits, bounded, until the group's operations are done, then tells its members that this rank leaves. Groups that
  // are left one after the other share the bound: torch destroys them so.
  void leave_group(const GroupPtr& group, std::chrono::milliseconds bound);
  void abort_group(const GroupPtr& group, const std::string& reason);
  void set_timeout(const GroupPtr& group, std::chrono::milliseconds timeout);

  // Begins to record what this rank's operations do, in `folder`; returns the file's path. Throws std::runtime_error.
  std::string start_timeline(const std::string& folder, int rank, int world_size);
  // What is not over is recorded as unfinished. Without a start: nothing.
  void stop_timeline();
  // What the maker of a group calls it.
  void describe_group(const GroupPtr& group, const std::string& description);
  // At the end of the process: leaves all groups, waits for the peers within the setting's bound, ends threads and MPI.
  // Idempotent, never throws, never hangs. `failed`: this process ends by an error, so its peers are not waited for.
  static void end_process(bool failed) noexcept;

  // Asked now and then by waiting callers; may throw (a signal handler of the interpreter did).
  static void set_interrupt_check(std::function<void()> check);
  static const std::function<void()>& interrupt_check();

 private:
  Runtime();
  void check_process() const;
  void start_inquiries();
  void joins(int rank, int world_size);
  void shutdown(bool failed) noexcept;
  bool can_part(const GroupState& group) const;

  const int pid_;
  mpi::Shared shared_;
  std::unique_ptr<device::Launchers> launchers_;
  CompletionQueue completions_;
  timeline::Timeline timeline_;
  std::once_flag joined_;
  Coordinator coordinator_;
  Driver driver_;
  std::unique_ptr<mpi::Inquiries> inquiries_;  // driver; null before MPI is up
  Inspection inspection_;
  mpi::GroupMaker maker_;
  std::atomic<bool> shut_down_{false};

  std::mutex leave_mutex_;
  Operation::Clock::time_point leave_until_{};  // guarded by leave_mutex_
  std::atomic<bool> left_work_{false};          // some group was left with work that nobody came for
};

}  // namespace multicomm
