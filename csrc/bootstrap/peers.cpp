#include "bootstrap/peers.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "bootstrap/host_identity.h"
#include "bootstrap/mpi_world.h"

namespace multicomm::bootstrap {
namespace {

struct ProcessStatus {
  char state = 0;  // as in /proc/pid/stat; 0: no such process
  uint64_t started = 0;
};

ProcessStatus status_of(int pid) {
  ProcessStatus status;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return status;
  // The program's name, in parentheses, may hold anything.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  fields >> status.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> status.started;
  return status;
}

uint64_t hash_bytes(const void* data, size_t size, uint64_t hash = 0xcbf29ce484222325) {  // FNV-1a
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

uint64_t node_hash() {
  const std::string identity = host_identity();
  return hash_bytes(identity.data(), identity.size());
}

}  // namespace

Peer this_process() {
  Peer peer;
  peer.pid = getpid();
  peer.started = status_of(peer.pid).started;
  peer.node = node_hash();
  host_name().copy(peer.host, sizeof(peer.host) - 1);
  return peer;
}

std::vector<Peer> exchange_peers(MPI_Comm world) {
  int size = 1;
  MPI_Comm_size(world, &size);
  const Peer mine = this_process();
  std::vector<Peer> all(static_cast<size_t>(size));
  const int code = MPI_Allgather(&mine, sizeof(Peer), MPI_BYTE, all.data(), sizeof(Peer), MPI_BYTE, world);
  if (code != MPI_SUCCESS) throw MpiError("MPI_Allgather", code);
  return all;
}

std::string place_text(const Peer& peer) {
  return "host " + std::string(peer.host, strnlen(peer.host, sizeof(peer.host))) + ", pid " + std::to_string(peer.pid);
}

std::string seen_text(const Peer& peer) {
  static const uint64_t own_node = node_hash();
  if (peer.node != own_node) return {};
  const ProcessStatus status = status_of(peer.pid);
  if (status.state == 0 || status.started != peer.started || status.state == 'Z' || status.state == 'X')
    return "has ended";
  if (status.state == 'T' || status.state == 't') return "is stopped (by a signal, or a debugger)";
  if (status.state == 'D') return "is held by the kernel (waits for a disk or a file server)";
  return "is there, but at the end of its program, stuck inside MPI, or without processor time";
}

uint64_t job_identity(const std::vector<Peer>& peers) {
  uint64_t hash = hash_bytes(nullptr, 0);
  for (const Peer& peer : peers) {
    const uint64_t process[] = {peer.node, peer.started, static_cast<uint64_t>(peer.pid)};
    hash = hash_bytes(process, sizeof(process), hash);
  }
  return hash;
}

}  // namespace multicomm::bootstrap
