#include "bootstrap/pmix_server/rank_watch.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "bootstrap/wire.h"

namespace multicomm::pmix {
namespace {

namespace wire = bootstrap::wire;

constexpr int kAskPids = 100;  // ms; only where the kernel has no pidfd (before Linux 5.3, some sandboxes)
constexpr timeval kSendBound{1, 0};

bool exists(int pid) { return kill(pid, 0) == 0 || errno != ESRCH; }

}  // namespace

RankWatch::RankWatch(const std::string& job, int node, int world, const std::vector<int>& ranks,
                     const std::vector<int>& pids)
    : world_(static_cast<uint64_t>(world)) {
  sockaddr_un address;
  const socklen_t size = wire::server_address(job, node, address);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener_ < 0 || bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener_, SOMAXCONN) != 0) {
    throw std::runtime_error("no socket for the ranks: " + std::string(std::strerror(errno)));
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, pids[i], 0));
    processes_[static_cast<Rank>(ranks[i])] = {pids[i], fd};
  }
}

RankWatch::~RankWatch() {
  for (const int connection : connections_) close(connection);
  for (const auto& [rank, process] : processes_)
    if (process.fd >= 0) close(process.fd);
  close(listener_);
}

void RankWatch::prepare(std::vector<pollfd>& watched, int& timeout) {
  timeout = -1;
  watched.push_back({listener_, POLLIN, 0});
  for (const int connection : connections_) watched.push_back({connection, POLLIN, 0});
  for (const auto& [rank, process] : processes_) {
    watched.push_back({process.fd, POLLIN, 0});
    if (process.fd < 0) timeout = kAskPids;
  }
}

void RankWatch::handle(const pollfd* first, const std::set<Rank>& finalised) {
  const pollfd* at = first + 1;
  const std::vector<int> connections = connections_;
  for (const int connection : connections) {
    if ((at++)->revents == 0 || receive(connection)) continue;
    close(connection);
    connections_.erase(std::find(connections_.begin(), connections_.end(), connection));
  }
  std::vector<Rank> vanished;
  for (auto it = processes_.begin(); it != processes_.end(); ++at) {
    const auto& [rank, process] = *it;
    const bool done = finalised.count(rank) > 0;
    const bool gone = process.fd >= 0 ? at->revents != 0 : !exists(process.pid);
    if (gone && !done) vanished.push_back(rank);
    if (gone || done) {
      if (process.fd >= 0) close(process.fd);
      it = processes_.erase(it);
    } else {
      ++it;
    }
  }
  for (const Rank rank : vanished) announce(rank);
  if (first->revents != 0) accept_rank();
}

void RankWatch::accept_rank() {
  const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (connection < 0) return;
  // A stopped rank that reads nothing, or a stranger who sends half a message, must not hold up the others.
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &kSendBound, sizeof(kSendBound));
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kSendBound, sizeof(kSendBound));
  if (!wire::same_user(connection)) {
    close(connection);
    return;
  }
  connections_.push_back(connection);
  for (const Rank rank : dead_) wire::send(connection, 'D', rank, {});
}

bool RankWatch::receive(int connection) {
  wire::Message message;
  if (!wire::receive(connection, message, 0)) return false;
  if (message.type == 'D' && message.id < world_) announce(static_cast<Rank>(message.id));
  return true;
}

void RankWatch::announce(Rank dead) {
  if (!dead_.insert(dead).second) return;
  for (const int connection : connections_) wire::send(connection, 'D', dead, {});
}

}  // namespace multicomm::pmix
