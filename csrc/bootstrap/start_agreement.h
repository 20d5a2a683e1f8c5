// What the ranks of the default world tell each other in the store before any of them enters MPI_Init.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bootstrap/key_value_store.h"

namespace multicomm::bootstrap {

// Prefix of all our keys in a store. torchrun's static rendezvous keeps one store over restarts, with the keys of the
// attempts before; they must not be read again.
std::string attempt_prefix();

// "rank 2", "ranks 2, 3"
std::string name_ranks(const std::vector<int>& ranks);

// One try to start MPI. It ends with one outcome, the same on every rank: all enter MPI_Init, or all throw the same
// text. A rank that gave up by itself while the others went on would leave them in MPI_Init, which has no deadline. A
// failed try is closed for good; a rank that comes later, or again, takes part in the next.
class StartAgreement {
 public:
  StartAgreement(KeyValueStore& store, int rank, int world_size, std::chrono::milliseconds timeout);

  // Every rank's text, by rank. Throws with the missing ranks when not all have come in time.
  std::vector<std::string> all_gather(const std::string& text);
  // The node's lowest rank publishes its server's environment; a failure goes to every rank of the world.
  void publish_environment(int node, const std::string& environment);
  void publish_failure(int node, const std::string& why);
  std::string environment_of(int node, const std::string& host, int lowest_rank);
  // Returns when every rank has come this far; throws the common failure. `dead`: ranks known to have ended meanwhile.
  void await_all(const std::function<std::vector<int>()>& dead);
  // Ends the try for every rank; throws its outcome. Only before await_all: it cannot have been settled to go without
  // this rank.
  [[noreturn]] void fail(const std::string& why);

  // Prefix of this try's keys.
  const std::string& prefix() const { return prefix_; }
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }

 private:
  // Settles the outcome if nobody has yet; returns what was settled. Empty: go.
  std::string settle(const std::string& failure);
  std::string outcome(std::chrono::milliseconds timeout);
  std::vector<int> without_key(const std::string& kind) const;

  KeyValueStore& store_;
  const int rank_;
  const int world_size_;
  const std::chrono::steady_clock::time_point deadline_;
  std::string prefix_;
};

}  // namespace multicomm::bootstrap
