// Starts MPI and makes the groups' communicators, in the background.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/key_value_store.h"
#include "bootstrap/mpi_runtime.h"
#include "transport/mpi/channel.h"

namespace multicomm::mpi {

struct GroupRequest {
  bootstrap::WorldRequest world;  // to start MPI with, if this is the first group
  std::vector<int> ranks;         // global ranks in group order
  int rank = 0;                   // this process, in group order
  std::string shared_settings;    // what all members must have set alike
  int64_t largest_count = 0;      // of elements in one MPI call
  std::chrono::milliseconds timeout{};
  std::function<void(std::shared_ptr<Channel>)> made;
  std::function<void(const std::string& why, bool timed_out)> failed;
};

// Members announce themselves in the store; when all are there, the communicator is made by its members alone
// (MPI_Comm_create_group, which would hold up unrelated creations while it waited for a late member; a duplicate, if
// there was a group of the same members before). Complete groups are begun one after the other, in an order drawn in
// the store that is the same on all ranks: three ranks that make {0,1}, {1,2}, {2,0}, each starting with another pair,
// would otherwise wait for each other in a circle.
class GroupMaker {
 public:
  // `on_started` is called once MPI is up.
  GroupMaker(Shared& shared, std::function<void()> on_started) : shared_(shared), on_started_(std::move(on_started)) {}

  void make(GroupRequest request);
  // Starts MPI without making a group; for ranks that are in none of ours but that the others' start-up needs.
  void start(bootstrap::WorldRequest request);
  void free(std::shared_ptr<Channel> channel);
  // Ends the thread; then shuts MPI down, at most for `bound`.
  void stop(std::chrono::milliseconds bound, bool work_pending);

 private:
  struct Pending {
    GroupRequest request;
    std::string keys;  // prefix of this creation's keys; empty until announced
    std::chrono::steady_clock::time_point deadline;
    int64_t order = 0;  // place among complete groups; 0 until all members have come, below when it is given up
  };

  class MakingState;
  using Making = std::shared_ptr<MakingState>;

  void run();
  void ensure_started(const bootstrap::WorldRequest& request);
  bool look(Pending& pending);
  void announce(Pending& pending);
  bool settle(Pending& pending, int64_t order);
  bool make_complete();
  bool make_one(Pending pending);  // false when it is left to its thread
  MPI_Comm parent_of(const std::vector<int>& ranks, int tag);
  std::string missing_members(Pending& pending) const;

  Shared& shared_;
  const std::function<void()> on_started_;
  std::unique_ptr<Types> types_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<GroupRequest> requests_;             // guarded by mutex_
  std::vector<bootstrap::WorldRequest> starts_;    // guarded by mutex_
  std::vector<std::shared_ptr<Channel>> to_free_;  // guarded by mutex_
  bool stopping_ = false;                          // guarded by mutex_
  bool ended_ = false;                             // guarded by mutex_

  // The maker thread's own.
  std::list<Pending> pending_;
  std::list<Making> making_;  // left to their threads

  std::mutex parents_mutex_;
  std::map<std::vector<int>, MPI_Comm> parents_;  // guarded by parents_mutex_; by members, in group order

  std::thread thread_;
};

}  // namespace multicomm::mpi
