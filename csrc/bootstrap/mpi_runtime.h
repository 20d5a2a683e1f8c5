// MPI start-up and shutdown of this process, whoever launched it.
#pragma once

#include <mpi.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bootstrap/key_value_store.h"
#include "bootstrap/peers.h"
#include "bootstrap/pmix_node.h"
#include "bootstrap/scoped_environment.h"

namespace multicomm::bootstrap {

// Who gave this process its MPI world.
enum class Provider {
  kLauncher,        // mpirun, srun --mpi=pmix
  kPreinitialised,  // mpi4py or the user called MPI_Init before us
  kPmixServer,      // our server per node, under torchrun or any plain processes with a store
  kSingleton,       // one process alone, where no server could be had
};

inline constexpr int kFromMpi = -1;

struct WorldRequest {
  std::shared_ptr<KeyValueStore> store;  // shared by all ranks of the default world
  int rank = 0;                          // in the default world; kFromMpi: whatever MPI says
  int world_size = 1;
  std::chrono::milliseconds timeout{};
  std::string server_executable;
};

struct BootstrapError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class MpiRuntime {
 public:
  // Blocking; needs every rank of the default world. Called again, checks that rank and size are still the same. Throws
  // BootstrapError. After a failure before MPI_Init it may be tried again, by all ranks; after a later one it fails
  // again.
  static MpiRuntime& start(const WorldRequest& request);
  static MpiRuntime* current();  // null before start, and in a forked child

  MPI_Comm world() const { return world_; }          // private duplicate of MPI_COMM_WORLD
  MPI_Comm inquiries() const { return inquiries_; }  // another one, for messages between coordinators
  Provider provider() const { return provider_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::vector<Peer>& peers() const { return peers_; }  // by rank
  std::string describe() const;
  // Ranks whose process has ended without finalising MPI, as the nodes' servers saw it; empty where there is no server
  // of ours.
  std::vector<int> dead_ranks() const;
  // What else was lost, in words: the node's server, the store. Empty as long as all is well.
  std::string trouble() const;
  // At the end of the process; idempotent. MPI_Finalize waits for all ranks, so it is called only when all of them have
  // come here within `bound`; else, or with work pending, it is skipped and said so.
  void shutdown(std::chrono::milliseconds bound, bool work_pending) noexcept;

 private:
  explicit MpiRuntime(const WorldRequest& request);
  void prepare(const WorldRequest& request, ScopedEnvironment& environment);
  void make_world(const WorldRequest& request);
  std::string await_all(std::chrono::milliseconds bound);
  void finalise(std::chrono::milliseconds bound);
  void leave_unfinalised(const char* what, const std::string& why);

  const pid_t pid_;
  Provider provider_ = Provider::kSingleton;
  MPI_Comm world_ = MPI_COMM_NULL;
  MPI_Comm inquiries_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::vector<Peer> peers_;
  std::atomic<bool> shut_down_{false};
  std::unique_ptr<PmixNode> node_;
};

// Throws BootstrapError at once when what is known before MPI is started contradicts torch's rank or world size.
void check_launcher(int rank, int world_size);

// For a rendezvous without a store, under an MPI launcher or an initialised MPI: starts MPI, returns its world's rank
// and size.
MpiRuntime& start_from_mpi();
// Rank 0's text on every rank. Collective over the world.
std::string broadcast_text(const MpiRuntime& runtime, const std::string& text);

// Whether an MPI launcher has started this very process. Not true for torchrun's workers, though torchrun may itself
// run under such a launcher and pass its variables on.
bool launched_by_mpi();

}  // namespace multicomm::bootstrap
