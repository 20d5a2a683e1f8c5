// Exchanges blobs between the nodes' PMIx servers over the store, in the lowest rank of each node.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap/key_value_store.h"

namespace multicomm::bootstrap {

// Key by which all know that a node's server or its lowest rank has gone, so that no exchange with it will come to an
// end.
std::string lost_node_key(const std::string& prefix, int node);

class Relay {
 public:
  // `socket` leads to the node's server.
  Relay(int socket, int node, std::string prefix, std::unique_ptr<KeyValueStore> store);
  // Blocks until the server closes its end. Runs on a thread of its own, in C++: MPI_Init may be holding the GIL.
  void run();

 private:
  struct Exchange {
    uint64_t id;
    std::string key;
    std::vector<int> nodes;
  };
  std::string key_of(const Exchange& exchange, int node) const;
  void publish(const std::string& body, uint64_t id);
  bool advance(const Exchange& exchange);  // true when answered
  void fail_all(const std::string& why);

  const int socket_;
  const int self_;
  const std::string prefix_;
  const std::unique_ptr<KeyValueStore> store_;
  std::vector<Exchange> open_;
};

}  // namespace multicomm::bootstrap
