// Which process is which rank, and what can be seen of it from this node.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

namespace multicomm::bootstrap {

struct Peer {
  uint64_t node = 0;     // hash of host_identity()
  uint64_t started = 0;  // in clock ticks since boot: tells a process from a later one with its number
  int32_t pid = 0;
  char host[60] = {};
};

Peer this_process();
// Of all ranks, by rank. Collective; throws MpiError.
std::vector<Peer> exchange_peers(MPI_Comm world);
std::string place_text(const Peer& peer);  // "host a, pid 12"
// What this node can see of a process that does not answer, such as "is stopped"; empty: nothing.
std::string seen_text(const Peer& peer);
// The same on all ranks of a job, and no other job's.
uint64_t job_identity(const std::vector<Peer>& peers);

}  // namespace multicomm::bootstrap
