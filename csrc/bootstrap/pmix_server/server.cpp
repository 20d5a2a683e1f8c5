#include "bootstrap/pmix_server/server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

#include "bootstrap/pmix_server/job_info.h"
#include "bootstrap/wire.h"

namespace multicomm::pmix {
namespace {

using namespace std::chrono_literals;
namespace wire = bootstrap::wire;

Server* instance = nullptr;  // libpmix's upcalls carry no pointer of ours

Status on_connected(const Proc*, void*, OperationCallback, void*) { return kOperationSucceeded; }

Status on_finalized(const Proc* proc, void*, OperationCallback, void*) {
  instance->finalized(proc->rank);
  return kOperationSucceeded;
}

Status on_abort(const Proc* proc, void*, int status, const char* message, Proc*, size_t, OperationCallback, void*) {
  std::fprintf(stderr, "multicomm: rank %u called MPI_Abort(%d)%s%s\n", proc == nullptr ? 0 : proc->rank, status,
               message == nullptr ? "" : ": ", message == nullptr ? "" : message);
  return kOperationSucceeded;
}

Status on_fence(const Proc* procs, size_t count, const Info*, size_t, char* data, size_t size, ModexCallback reply,
                void* context) {
  return instance->fence(procs, count, data == nullptr ? std::string() : std::string(data, size), reply, context);
}

// Accepted, since it is how libpmix learns which files to remove when a rank dies.
Status on_job_control(const Proc*, const Proc*, size_t, const Info*, size_t, InfoCallback, void*) {
  return kOperationSucceeded;
}

Status on_group(int operation, char* name, const Proc* procs, size_t count, const Info*, size_t, InfoCallback reply,
                void* context) {
  constexpr int kConstruct = 0;
  if (operation != kConstruct) return kOperationSucceeded;
  return instance->group(name, procs, count, reply, context);
}

// The folder of libpmix's and the ranks' files.
std::string make_folder() {
  std::string folder = (std::filesystem::temp_directory_path() / "multicomm-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr)
    throw std::runtime_error("no temporary folder: " + std::string(std::strerror(errno)));
  return folder;
}

}  // namespace

Server::Server(bootstrap::NodeConfig config, int socket)
    : config_(std::move(config)),
      library_(config_.libpmix),
      socket_(socket),
      wake_(eventfd(0, EFD_CLOEXEC)),
      watch_(config_.name, config_.node, config_.world_size(), config_.ranks[static_cast<size_t>(config_.node)],
             config_.pids),
      folder_(make_folder()) {
  for (size_t node = 0; node < config_.ranks.size(); ++node)
    for (const int rank : config_.ranks[node]) node_of_[rank] = static_cast<int>(node);
  instance = this;
}

std::string Server::start() {
  const auto& local = config_.ranks[static_cast<size_t>(config_.node)];
  std::filesystem::create_directories(folder_ + "/job");
  for (const int rank : local) std::filesystem::create_directories(folder_ + "/job/" + std::to_string(rank));

  static ServerModule module{};
  module.client_connected = on_connected;
  module.client_finalized = on_finalized;
  module.abort = on_abort;
  module.fence = on_fence;
  module.job_control = on_job_control;
  module.group = on_group;
  InfoList server;
  server.add("pmix.srvr.tmpdir", folder_);
  server.add("pmix.sys.tmpdir", folder_);
  server.add("pmix.srv.nspace", config_.name + "-server");
  server.add_rank("pmix.srv.rank", static_cast<Rank>(config_.node));
  library_.check(library_.server_init(&module, server.data(), server.size()), "PMIx_server_init");

  JobInfo job(config_, folder_);
  {
    Completion completion;
    const Status status = library_.register_nspace(config_.name.c_str(), static_cast<int>(local.size()), job.data(),
                                                   job.size(), Completion::done, &completion);
    library_.check(status == kSuccess ? completion.wait() : status, "PMIx_server_register_nspace");
  }
  std::string environment;
  for (const int rank : local) {
    Proc proc{};
    std::snprintf(proc.nspace, sizeof(proc.nspace), "%s", config_.name.c_str());
    proc.rank = static_cast<Rank>(rank);
    Completion completion;
    const Status status = library_.register_client(&proc, getuid(), getgid(), nullptr, Completion::done, &completion);
    library_.check(status == kSuccess ? completion.wait() : status, "PMIx_server_register_client");
    if (rank != local.front()) continue;
    char** entries = nullptr;  // alike for all ranks but for PMIX_RANK, which each sets itself
    library_.check(library_.setup_fork(&proc, &entries), "PMIx_server_setup_fork");
    for (char** entry = entries; entry != nullptr && *entry != nullptr; ++entry)
      environment += std::string(*entry) + '\0';
  }
  return environment;
}

void Server::finalized(Rank rank) {
  {
    const std::lock_guard lock(mutex_);
    finalized_.insert(rank);
  }
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) std::perror("multicomm-pmix-server: eventfd");
}

std::string Server::nodes_of(const Proc* procs, size_t count) const {
  std::set<int> nodes;
  for (size_t i = 0; i < count; ++i) {
    for (const auto& [rank, node] : node_of_)
      if (procs[i].rank == static_cast<Rank>(rank) || procs[i].rank == kRankWildcard) nodes.insert(node);
  }
  std::string text;
  for (const int node : nodes) text += (text.empty() ? "" : " ") + std::to_string(node);
  return text;
}

void Server::exchange(const std::string& key, const std::string& nodes, const std::string& blob, Reply reply) {
  bool lost;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t id = next_id_++;
    const std::string name = key + "#" + std::to_string(counts_[key]++);
    lost = parent_gone_ || !wire::send(socket_, 'X', id, name + '\0' + nodes + '\0' + blob);
    if (!lost) replies_[id] = std::move(reply);
  }
  // libpmix does not expect its callback from inside the upcall.
  if (lost) std::thread([reply = std::move(reply)] { reply(false, {}); }).detach();
}

Status Server::fence(const Proc* procs, size_t count, std::string blob, ModexCallback callback, void* context) {
  const auto reply = [callback, context](bool ok, const std::string& blobs) {
    auto* kept = new std::string(ok ? blobs.substr(sizeof(uint64_t)) : std::string());
    callback(
        ok ? kSuccess : kError, kept->data(), kept->size(), context,
        [](void* p) { delete static_cast<std::string*>(p); }, kept);
  };
  const std::string nodes = nodes_of(procs, count);
  if (nodes == std::to_string(config_.node)) {
    reply(true, std::string(sizeof(uint64_t), '\0') + blob);
    return kSuccess;
  }
  std::string key = "fence";
  for (size_t i = 0; i < count; ++i) key += "," + std::to_string(static_cast<int32_t>(procs[i].rank));
  exchange(key, nodes, blob, reply);
  return kSuccess;
}

Status Server::group(const char* name, const Proc* procs, size_t count, InfoCallback callback, void* context) {
  std::vector<Proc> members(procs, procs + count);
  exchange(std::string("group:") + name, nodes_of(procs, count), {},
           [members, callback, context](bool ok, const std::string& blobs) {
             struct Answer {
               std::vector<Proc> members;
               DataArray array;
               Info info[2];
             };
             auto* answer = new Answer{members, {kProc, members.size(), nullptr}, {}};
             answer->array.array = answer->members.data();
             std::strcpy(answer->info[0].key, "pmix.grp.ctxid");
             answer->info[0].value.type = kSize;
             if (ok) std::memcpy(&answer->info[0].value.data.size, blobs.data(), sizeof(uint64_t));
             std::strcpy(answer->info[1].key, "pmix.grp.mbrs");
             answer->info[1].value.type = kDataArray;
             answer->info[1].value.data.array = &answer->array;
             callback(
                 ok ? kSuccess : kError, answer->info, ok ? 2 : 0, context,
                 [](void* p) { delete static_cast<Answer*>(p); }, answer);
           });
  return kSuccess;
}

bool Server::receive() {
  wire::Message message;
  if (!wire::receive(socket_, message)) {
    lose_parent();
    return true;
  }
  if (message.type == 'Q') return false;
  Reply reply;
  {
    const std::lock_guard lock(mutex_);
    const auto it = replies_.find(message.id);
    if (it == replies_.end()) return true;
    reply = std::move(it->second);
    replies_.erase(it);
  }
  const bool ok = message.type == 'x' && message.body.size() >= sizeof(uint64_t);  // the context, then the blobs
  reply(ok, message.body);
  return true;
}

void Server::lose_parent() {
  std::map<uint64_t, Reply> unanswered;
  {
    const std::lock_guard lock(mutex_);
    parent_gone_ = true;
    unanswered.swap(replies_);
  }
  for (const auto& [id, reply] : unanswered) reply(false, {});
}

void Server::run() {
  while (!watch_.all_done()) {
    bool listen;
    {
      const std::lock_guard lock(mutex_);
      listen = !parent_gone_;
    }
    std::vector<pollfd> watched{{wake_, POLLIN, 0}, {listen ? socket_ : -1, POLLIN, 0}};
    int timeout = -1;
    watch_.prepare(watched, timeout);
    if (poll(watched.data(), watched.size(), timeout) < 0) continue;
    if (watched[0].revents != 0) {
      uint64_t ignored;
      if (read(wake_, &ignored, sizeof(ignored)) < 0) std::perror("multicomm-pmix-server: eventfd");
    }
    if (watched[1].revents != 0 && !receive()) return;
    std::set<Rank> finalized;
    {
      const std::lock_guard lock(mutex_);
      finalized = finalized_;
    }
    watch_.handle(&watched[2], finalized);
  }
}

Server::~Server() { remove_folder(); }

void Server::stop() {
  std::this_thread::sleep_for(
      100ms);  // libpmix may still be answering the last rank's PMIx_Finalize; it has no event for that
  Completion completion;
  library_.deregister_nspace(config_.name.c_str(), Completion::done, &completion);
  completion.wait();
  library_.server_finalize();
  remove_folder();
}

void Server::remove_folder() const {
  // Ranks remove their session folders after PMIx_Finalize, at the same time as we do: again until it is gone.
  std::error_code error;
  for (int i = 0; i < 50 && std::filesystem::exists(folder_, error); ++i) {
    std::filesystem::remove_all(folder_, error);
    if (error) std::this_thread::sleep_for(20ms);
  }
}

}  // namespace multicomm::pmix
