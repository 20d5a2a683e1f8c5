// One rank's part in giving the processes of a job a PMIx environment: who is on which node, one server per node.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/key_value_store.h"
#include "bootstrap/node_config.h"

namespace multicomm::bootstrap {

// Prefix of all our keys in a store. torchrun's static rendezvous keeps one store over restarts, with the keys of the
// attempts before; they must not be read again.
std::string attempt_prefix();

class PmixNode {
 public:
  // Blocking. Publishes this rank, waits for all ranks' publications, starts the node's server if this is the node's
  // lowest rank. Throws std::runtime_error with the same text on every rank when any node fails, or with the missing
  // ranks.
  PmixNode(KeyValueStore& store, int rank, int world_size, std::chrono::milliseconds timeout,
           const std::string& server);
  ~PmixNode();
  PmixNode(const PmixNode&) = delete;
  PmixNode& operator=(const PmixNode&) = delete;

  const std::map<std::string, std::string>& environment() const { return environment_; }
  int local_size() const { return static_cast<int>(config_.ranks[static_cast<size_t>(config_.node)].size()); }
  int nodes() const { return static_cast<int>(config_.hosts.size()); }
  // After MPI_Finalize: waits, bounded, for the server to end, and for the other nodes where this process may host the
  // store.
  void finish();

 private:
  bool leader() const { return config_.ranks[static_cast<size_t>(config_.node)].front() == rank_; }
  std::vector<std::string> gather_hosts(KeyValueStore& store, std::chrono::steady_clock::time_point deadline);
  void arrange_nodes(const std::vector<std::string>& published);
  void start_server(const std::string& server);
  void relay();

  const int rank_;
  const int world_size_;
  std::string prefix_;
  NodeConfig config_;
  std::map<std::string, std::string> environment_;
  std::string server_environment_;

  // The lowest rank's of a node.
  int socket_ = -1;
  pid_t server_pid_ = -1;
  std::unique_ptr<KeyValueStore> relay_store_;
  std::unique_ptr<KeyValueStore> own_store_;
  std::thread relay_;
};

}  // namespace multicomm::bootstrap
