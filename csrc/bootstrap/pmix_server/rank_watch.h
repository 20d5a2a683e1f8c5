// Watches the processes of a node's ranks, and tells the ranks who has died.
#pragma once

#include <poll.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/pmix_server/pmix_abi.h"

namespace multicomm::pmix {

// Used by one thread.
class RankWatch {
 public:
  // Throws std::runtime_error when the ranks' address is taken.
  RankWatch(const std::string& job, int node, int world, const std::vector<int>& ranks, const std::vector<int>& pids);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Appends what poll() shall wait for; `timeout` becomes its time-out in ms, -1 for none.
  void prepare(std::vector<pollfd>& watched, int& timeout);
  // `first`: the first of those, after poll(). Ranks in `finalised` are not dead when they go.
  void handle(const pollfd* first, const std::set<Rank>& finalised);
  // No local rank is left that could need us.
  bool all_done() const { return processes_.empty(); }

 private:
  struct Process {
    int pid;
    int fd;  // a pidfd; -1 where the kernel has none
  };
  void accept_rank();
  bool receive(int connection);  // false when it is closed
  void announce(Rank dead);

  const uint64_t world_;  // ranks of all nodes
  int listener_ = -1;
  std::map<Rank, Process> processes_;  // of the local ranks that are still there
  std::vector<int> connections_;
  std::set<Rank> dead_;  // of all nodes
};

}  // namespace multicomm::pmix
