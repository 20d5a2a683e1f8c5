// Which ranks have vanished, as the nodes' servers see it.
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/key_value_store.h"

namespace multicomm::bootstrap {

// A connection to the node's server, which says at once when a local rank's process ends without having finalised MPI.
// Between nodes the word goes by the store, written and read by each node's lowest rank that is still there.
class DeathWatch {
 public:
  struct Place {
    std::string job;  // name of the server's socket, with the node
    int node = 0;
    int nodes = 1;
    int world = 1;  // ranks
    int rank = 0;
    std::vector<int> local;  // ranks of this node, ascending
    std::string prefix;      // of the keys in the store
  };

  // Throws std::runtime_error when the server cannot be reached.
  DeathWatch(Place place, std::shared_ptr<KeyValueStore> store);
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  // `leaving`: this rank ends without finalising MPI, which the other nodes shall hear although it may be the last of
  // its node. Waits a moment only, since the thread may be in the store, whose host may be gone. What is known stays
  // known. Idempotent; one caller at a time. False when the thread is still there.
  bool stop(bool leaving);
  std::vector<int> dead() const;  // in the order in which word of them came: the first is likelier cause than effect
  // What else was lost, in words; empty as long as all is well.
  std::string trouble() const;

 private:
  void run();
  void watch();
  void receive();
  bool speaks_for_node() const;
  void exchange_with_other_nodes();
  bool insert(int dead);  // false when known
  void lose(const std::string& what);

  const Place place_;
  const std::shared_ptr<KeyValueStore> origin_;  // cloned when this rank comes to speak for its node
  int socket_ = -1;
  int stop_ = -1;  // eventfd

  // The thread's own.
  std::unique_ptr<KeyValueStore> store_;
  bool server_lost_ = false;
  bool store_lost_ = false;
  std::set<int> posted_;
  int64_t next_ = 1;  // number of the next death to read from the store

  std::atomic<bool> leaving_{false};
  std::promise<void> ended_;  // the thread's end
  std::future<void> end_ = ended_.get_future();

  mutable std::mutex mutex_;
  std::vector<int> dead_;  // guarded by mutex_
  std::string trouble_;    // guarded by mutex_
  std::thread thread_;
};

}  // namespace multicomm::bootstrap
