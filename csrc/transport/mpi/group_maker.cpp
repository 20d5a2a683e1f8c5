#include "transport/mpi/group_maker.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "bootstrap/parse.h"
#include "coordinator/received.h"

namespace multicomm::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kSettingsBytes = 512;
constexpr std::chrono::microseconds kShortestPause = 100us;  // between two looks into the store
constexpr std::chrono::microseconds kLongestPause = 10ms;
constexpr int64_t kTags = 32'767;  // MPI guarantees tags up to this

std::string members_text(const std::vector<int>& ranks) {
  uint64_t hash = ranks.size();
  for (const int rank : ranks) hash = hash_combine(hash, static_cast<uint64_t>(rank));
  char text[32];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

uint64_t text_hash(const std::string& text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = hash_combine(hash, static_cast<uint64_t>(c));
  return hash;
}

class CommGroup {
 public:
  CommGroup(MPI_Comm world, const std::vector<int>& ranks) {
    MPI_Group all = MPI_GROUP_NULL;
    check(MPI_Comm_group(world, &all), "MPI_Comm_group");
    const int code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &group_);
    MPI_Group_free(&all);
    check(code, "MPI_Group_incl");
  }
  ~CommGroup() { MPI_Group_free(&group_); }
  CommGroup(const CommGroup&) = delete;
  CommGroup& operator=(const CommGroup&) = delete;
  MPI_Group get() const { return group_; }

 private:
  MPI_Group group_ = MPI_GROUP_NULL;
};

// Members with different settings would plan different batches and exchange each other's data.
void compare_settings(MPI_Comm communicator, const GroupRequest& request) {
  char mine[kSettingsBytes] = {};
  std::memcpy(mine, request.shared_settings.data(), std::min(request.shared_settings.size(), kSettingsBytes - 1));
  std::vector<char> all(kSettingsBytes * request.ranks.size());
  check(MPI_Allgather(mine, kSettingsBytes, MPI_BYTE, all.data(), kSettingsBytes, MPI_BYTE, communicator),
        "MPI_Allgather");
  std::string text;
  bool differ = false;
  for (size_t r = 0; r < request.ranks.size(); ++r) {
    const std::string theirs = text_in(all.data() + r * kSettingsBytes, kSettingsBytes);
    differ = differ || theirs != text_in(mine, kSettingsBytes);
    text += "\n  rank " + std::to_string(request.ranks[r]) + ": " + theirs;
  }
  if (differ) throw std::runtime_error("the ranks have different settings, which must be alike on all of them:" + text);
}

// Memory shared by all members, or null, on all of them alike, when they are not on one node or it cannot be had.
std::unique_ptr<shm::Segment> make_segment(MPI_Comm communicator, int rank, int size) {
  if (size == 1) return nullptr;
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
  int local = 0;
  MPI_Comm_size(node, &local);
  MPI_Comm_free(&node);
  std::unique_ptr<shm::Segment> segment;
  shm::Segment::Address address{};
  if (rank == 0 && local == size) {
    segment = shm::Segment::create(static_cast<size_t>(size));
    if (segment) address = segment->address();
  }
  check(MPI_Bcast(&address, sizeof(address), MPI_BYTE, 0, communicator), "MPI_Bcast");
  if (rank != 0 && local == size && address.pid != 0) segment = shm::Segment::open(address, static_cast<size_t>(size));
  int mapped = segment ? 1 : 0;
  check(MPI_Allreduce(MPI_IN_PLACE, &mapped, 1, MPI_INT, MPI_MIN, communicator), "MPI_Allreduce");
  if (mapped == 0) return nullptr;
  segment->close_descriptor();
  return segment;
}

void make_channel(const GroupRequest& request, MPI_Comm world, int tag, uint64_t identity, Shared& shared) {
  try {
    MPI_Comm control = MPI_COMM_NULL, data = MPI_COMM_NULL;
    {
      const CommGroup group(world, request.ranks);
      check(MPI_Comm_create_group(world, group.get(), tag, &control), "MPI_Comm_create_group");
    }
    check(MPI_Comm_set_errhandler(control, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    compare_settings(control, request);
    check(MPI_Comm_dup(control, &data), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(data, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    auto segment = make_segment(control, request.rank, static_cast<int>(request.ranks.size()));
    request.made(
        std::make_shared<MpiChannel>(control, data, shared, std::move(segment), request.largest_count, identity));
  } catch (const std::exception& error) {
    request.failed(error.what(), false);
  }
}

}  // namespace

void GroupMaker::make(GroupRequest request) {
  const std::lock_guard lock(mutex_);
  requests_.push_back(std::move(request));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_one();
}

void GroupMaker::start(bootstrap::WorldRequest request) {
  const std::lock_guard lock(mutex_);
  starts_.push_back(std::move(request));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_one();
}

void GroupMaker::free(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  to_free_.push_back(std::move(channel));
  changed_.notify_one();
}

void GroupMaker::ensure_started(const bootstrap::WorldRequest& request) {
  bootstrap::MpiRuntime::start(request);
  if (types_) return;
  types_ = std::make_unique<Types>();
  shared_.types = types_.get();
  on_started_();
}

void GroupMaker::run() {
  pthread_setname_np(pthread_self(), "mc-maker");
  auto pause = kShortestPause;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    std::vector<GroupRequest> fresh = std::exchange(requests_, {});
    std::vector<bootstrap::WorldRequest> starts = std::exchange(starts_, {});
    std::vector<std::shared_ptr<Channel>> to_free = std::exchange(to_free_, {});
    lock.unlock();

    for (const auto& start : starts) {
      try {
        ensure_started(start);
      } catch (const std::exception& error) {
        // Nobody waits for this start; groups made later report the same by themselves.
        std::fprintf(stderr, "multicomm: rank %d: start: %s\n", start.rank, error.what());
      }
    }
    for (GroupRequest& request : fresh) {
      const auto deadline = Clock::now() + request.timeout;
      pending_.push_back({std::move(request), {}, deadline});
    }
    for (const auto& channel : to_free) static_cast<MpiChannel&>(*channel).free_communicators();
    pending_.remove_if([this](Pending& pending) { return !look(pending); });
    const bool made = make_next();
    if (made || !fresh.empty()) pause = kShortestPause;

    lock.lock();
    const auto woken = [this] { return stopping_ || !requests_.empty() || !starts_.empty() || !to_free_.empty(); };
    if (pending_.empty()) {
      changed_.wait(lock, woken);
    } else if (!made) {
      changed_.wait_for(lock, pause, woken);
      pause = std::min(pause * 2, kLongestPause);
    }
  }
  ended_ = true;
  changed_.notify_all();
}

// Announces the group, and reads its place in the order once it is complete. False when it has failed.
bool GroupMaker::look(Pending& pending) {
  try {
    if (pending.keys.empty()) {
      ensure_started(pending.request.world);
      announce(pending);
    }
    auto& store = *pending.request.world.store;
    if (pending.order == 0 && store.check(pending.keys + "complete"))
      pending.order = bootstrap::parse_number(store.get(pending.keys + "complete", 10s), 1, INT64_MAX,
                                              "the group's place in the order of making");
    if (pending.order != 0 || Clock::now() < pending.deadline) return true;
    pending.request.failed("not every rank of the group has made it within its time-out: " + missing_members(pending) +
                               " did not come (they have not called new_group for these ranks, or fewer times than the "
                               "others)",
                           true);
  } catch (const std::exception& error) {
    pending.request.failed(error.what(), false);
  }
  return false;
}

// The keys name the members and how often this rank has announced a group of just these members, counted in the store.
// Not torch's name for the group: with use_local_synchronization it counts the groups that each rank has made, so ranks
// may disagree on it. And not a count kept in this process: a store may outlive it. Two groups of the same members are
// told apart by the order in which they are made, which torch requires to be the same on all of them.
void GroupMaker::announce(Pending& pending) {
  auto& store = *pending.request.world.store;
  const auto& ranks = pending.request.ranks;
  const std::string self = std::to_string(pending.request.rank);
  const std::string family = bootstrap::attempt_prefix() + "group/" + members_text(ranks) + "/";
  pending.keys = family + std::to_string(store.add(family + "made/" + self, 1)) + "/";
  if (pending.request.rank == 0) {
    // Distinguishes this creation from all others that share a rank with it.
    const int64_t tag = next_tag_++ * pending.request.world.world_size + ranks.front();
    store.set(pending.keys + "tag", std::to_string(tag % kTags));
  }
  store.set(pending.keys + "member/" + self, "1");
  if (store.add(pending.keys + "members", 1) != static_cast<int64_t>(ranks.size())) return;
  // The last one to come draws the group's place in the order in which complete groups are made.
  store.set(pending.keys + "complete", std::to_string(store.add(bootstrap::attempt_prefix() + "group/order", 1)));
}

// Makes the first complete group in the order. All ranks go by the same order, so of all groups being made the first is
// always first for each of its members: nobody waits in a circle. A group whose members are all counted but whose place
// is not published yet may come before; one that is not counted in full will draw a later place.
bool GroupMaker::make_next() {
  auto next = pending_.end();
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    if (it->order != 0 && (next == pending_.end() || it->order < next->order)) next = it;
  }
  if (next == pending_.end()) return false;
  try {
    for (const Pending& other : pending_) {
      const auto members = static_cast<int64_t>(other.request.ranks.size());
      if (other.order == 0 && other.request.world.store->add(other.keys + "members", 0) == members) return false;
    }
    const std::string tag_text = next->request.world.store->get(next->keys + "tag", 10s);
    const auto tag = static_cast<int>(bootstrap::parse_number(tag_text, 0, kTags - 1, "the tag of the group's making"));
    make_channel(next->request, bootstrap::MpiRuntime::current()->world(), tag, text_hash(next->keys), shared_);
  } catch (const std::exception& error) {
    next->request.failed(error.what(), false);
  }
  pending_.erase(next);
  return true;
}

std::string GroupMaker::missing_members(Pending& pending) const {
  std::string text;
  for (size_t r = 0; r < pending.request.ranks.size(); ++r) {
    if (pending.request.world.store->check(pending.keys + "member/" + std::to_string(r))) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(pending.request.ranks[r]);
  }
  return "rank " + text;
}

void GroupMaker::stop(std::chrono::milliseconds bound, bool work_pending) {
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  stopping_ = true;
  changed_.notify_all();
  if (thread_.joinable()) {
    // It may be starting MPI, waiting for ranks that never come: the end of the process does not wait with it.
    if (!changed_.wait_for(lock, bound, [this] { return ended_; })) {
      thread_.detach();
      return;
    }
    lock.unlock();
    thread_.join();
  } else {
    lock.unlock();
  }
  if (auto* runtime = bootstrap::MpiRuntime::current()) runtime->shutdown(bound, work_pending);
}

}  // namespace multicomm::mpi
