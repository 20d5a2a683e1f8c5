// One rank's part in giving the processes of a job a PMIx environment: who is on which node, one server per node.
#pragma once

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/death_watch.h"
#include "bootstrap/key_value_store.h"
#include "bootstrap/node_config.h"
#include "bootstrap/server_process.h"
#include "bootstrap/start_agreement.h"

namespace multicomm::bootstrap {

class PmixNode {
 public:
  // Blocking. Publishes this rank, waits for all ranks' publications, starts the node's server if this is the node's
  // lowest rank. Throws std::runtime_error, with the same text on every rank, unless all ranks can enter MPI_Init now.
  PmixNode(std::shared_ptr<KeyValueStore> store, int rank, int world_size, std::chrono::milliseconds timeout,
           const std::string& server);
  ~PmixNode();
  PmixNode(const PmixNode&) = delete;
  PmixNode& operator=(const PmixNode&) = delete;

  const std::map<std::string, std::string>& environment() const { return environment_; }
  int local_size() const { return static_cast<int>(local().size()); }
  int nodes() const { return static_cast<int>(config_.hosts.size()); }
  // Ranks whose process has ended without finalising MPI, and what else was lost.
  std::vector<int> dead_ranks() const { return watch_->dead(); }
  std::string trouble() const { return watch_->trouble(); }
  // After MPI_Finalize: waits, bounded, for the server to end, and for the other nodes where this process may host the
  // store.
  void finish();
  // Before this process ends without MPI_Finalize: lets the other nodes know. Bounded.
  void leave();

 private:
  const std::vector<int>& local() const { return config_.ranks[static_cast<size_t>(config_.node)]; }
  bool leader() const { return local().front() == rank_; }
  void serve(StartAgreement& agreement, const std::string& program);
  void watch_deaths(StartAgreement& agreement);
  void end_server();
  void wait_for_other_nodes();

  const int rank_;
  const std::shared_ptr<KeyValueStore> store_;
  NodeConfig config_;
  std::string prefix_;
  std::map<std::string, std::string> environment_;

  // The lowest rank's of a node.
  std::unique_ptr<ServerProcess> server_;
  std::thread relay_;
  std::future<void> relay_end_;

  std::unique_ptr<DeathWatch> watch_;
};

}  // namespace multicomm::bootstrap
