// One node's PMIx server.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "bootstrap/node_config.h"
#include "bootstrap/pmix_server/library.h"
#include "bootstrap/pmix_server/rank_watch.h"

namespace multicomm::pmix {

class Server {
 public:
  // `socket` leads to the node's lowest rank, which exchanges blobs with the other nodes for us.
  Server(bootstrap::NodeConfig config, int socket);
  ~Server();  // removes the temporary folder
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& folder() const { return folder_; }

  // Registers job and clients with libpmix; returns the environment for the ranks, NUL-terminated entries.
  std::string start();
  // Serves until every local rank has finalised MPI or its process is gone, or until told to end.
  void run();
  // Deregisters and removes the temporary folder.
  void stop();

  // --- upcalls, on libpmix's progress thread: none may block ---
  void finalized(Rank rank);
  Status fence(const Proc* procs, size_t count, std::string blob, ModexCallback reply, void* context);
  Status group(const char* name, const Proc* procs, size_t count, InfoCallback reply, void* context);

 private:
  using Reply = std::function<void(bool ok, const std::string& blobs)>;
  std::string nodes_of(const Proc* procs, size_t count) const;
  void exchange(const std::string& key, const std::string& nodes, const std::string& blob, Reply reply);
  bool receive();  // false when told to end
  void lose_parent();
  void remove_folder() const;

  const bootstrap::NodeConfig config_;
  const Library library_;
  const int socket_;
  const int wake_;  // eventfd: a rank has finalised
  RankWatch watch_;
  const std::string folder_;
  std::map<int, int> node_of_;

  std::mutex mutex_;
  std::set<Rank> finalized_;           // guarded by mutex_
  std::map<uint64_t, Reply> replies_;  // guarded by mutex_
  std::map<std::string, int> counts_;  // guarded by mutex_; how often each exchange has taken place
  uint64_t next_id_ = 1;               // guarded by mutex_
  bool parent_gone_ = false;           // guarded by mutex_
};

}  // namespace multicomm::pmix
