#include "transport/mpi/group_maker.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "bootstrap/background.h"
#include "bootstrap/host_identity.h"
#include "coordinator/received.h"

namespace multicomm::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kSettingsBytes = 512;
constexpr std::chrono::microseconds kShortestPause = 100us;  // between two looks into the store
constexpr std::chrono::microseconds kLongestPause = 10ms;
constexpr std::chrono::microseconds kSpin = 300us;  // for MPI, before the naps
constexpr std::chrono::microseconds kNap = 20us;
constexpr unsigned long kTimerSlack = 1000;                // ns; a nap takes 50 us longer by default
constexpr std::chrono::seconds kSettling = 5s;             // from one key of the store to the next
constexpr std::chrono::milliseconds kMakingPatience = 1s;  // for members that are all known to be there
constexpr int64_t kGivenUp = -1;   // minus the group rank of who did it, in place of a place in the order
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

// What each member tells the others on the new communicator.
struct Introduction {
  char settings[kSettingsBytes];
  uint64_t host;                 // hash of its identity
  uint64_t device;               // 1: it could use one
  shm::Segment::Address memory;  // the first member's; pid 0: none
};

// Members with different settings would plan different batches and exchange each other's data.
void compare_settings(const std::vector<Introduction>& all, const std::vector<int>& ranks) {
  std::string text;
  bool differ = false;
  const auto settings_of = [&](size_t r) { return text_in(all[r].settings, kSettingsBytes); };
  for (size_t r = 0; r < ranks.size(); ++r) {
    differ = differ || settings_of(r) != settings_of(0);
    text += "\n  rank " + std::to_string(ranks[r]) + ": " + settings_of(r);
  }
  if (differ) throw std::runtime_error("the ranks have different settings, which must be alike on all of them:" + text);
}

bool on_one_host(const std::vector<Introduction>& all) {
  return std::all_of(all.begin(), all.end(), [&](const Introduction& each) { return each.host == all[0].host; });
}

// MPI's own waits spin, and yield at best. Where ranks outnumber the cores, or other programs want them, that costs a
// time slice for every message that a collective is made of; a thread that sleeps is woken at once.
void wait_for(MPI_Request& request) {
  const auto begin = Clock::now();
  std::chrono::microseconds nap = kNap;
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return;
    const auto waited = Clock::now() - begin;
    if (waited < kSpin) continue;
    std::this_thread::sleep_for(nap);
    // A member that has gone may never come: this thread then waits on, but hardly ever looks.
    if (waited > kMakingPatience) nap = std::min(nap * 2, kLongestPause);
  }
}

// A duplicate under way.
class Duplicate {
 public:
  explicit Duplicate(MPI_Comm communicator) {
    check(MPI_Comm_idup(communicator, made_.get(), &request_), "MPI_Comm_idup");
  }
  ~Duplicate() {
    if (request_ != MPI_REQUEST_NULL) (void)made_.release();  // another call has failed, and MPI may still write
  }
  Duplicate(const Duplicate&) = delete;
  Duplicate& operator=(const Duplicate&) = delete;
  MPI_Comm get() {
    wait_for(request_);
    check(MPI_Comm_set_errhandler(*made_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return *made_;
  }

 private:
  std::unique_ptr<MPI_Comm> made_ = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request_ = MPI_REQUEST_NULL;
};

// `parent`: a communicator of just these members.
std::shared_ptr<Channel> make_channel(const GroupRequest& request, MPI_Comm parent, uint64_t identity, Shared& shared) {
  const size_t size = request.ranks.size();
  MPI_Comm control = Duplicate(parent).get();
  // Meanwhile. Not of `control`: a duplicate is several collectives, of which the later ones start when MPI likes.
  Duplicate data(parent);
  std::unique_ptr<shm::Segment> segment;
  Introduction mine{};
  std::memcpy(mine.settings, request.shared_settings.data(),
              std::min(request.shared_settings.size(), kSettingsBytes - 1));
  static const uint64_t host = text_hash(bootstrap::host_identity());
  mine.host = host;
  mine.device = shared.has_device && shared.has_device() ? 1 : 0;
  if (request.rank == 0 && size > 1) segment = shm::Segment::create(size);
  if (segment) mine.memory = segment->address();
  std::vector<Introduction> all(size);
  MPI_Request introduced = MPI_REQUEST_NULL;
  check(MPI_Iallgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, control, &introduced),
        "MPI_Iallgather");
  wait_for(introduced);
  // Memory that all members share, where they are on one host and it can be had: on all of them alike, or on none.
  if (!on_one_host(all) || all[0].memory.pid == 0) segment.reset();
  else if (request.rank != 0) segment = shm::Segment::open(all[0].memory, size);
  int mapped = segment ? 1 : 0;
  MPI_Request agreed = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(MPI_IN_PLACE, &mapped, 1, MPI_INT, MPI_MIN, control, &agreed), "MPI_Iallreduce");
  wait_for(agreed);  // first: MPI writes into this frame until then
  MPI_Comm data_communicator = data.get();
  compare_settings(all, request.ranks);  // with nothing in flight any more
  if (mapped == 0) segment.reset();
  else segment->close_descriptor();
  std::unique_ptr<GroupDevice> device;
  if (shared.make_device) {
    const bool all_have =
        std::all_of(all.begin(), all.end(), [](const Introduction& each) { return each.device != 0; });
    const MPI_Comm staging = all_have ? Duplicate(parent).get() : MPI_COMM_NULL;
    device = shared.make_device(
        {&shared, staging, request.rank, static_cast<int>(size), request.ranks, request.largest_count, host});
  }
  return std::make_shared<MpiChannel>(control, data_communicator, shared, std::move(segment), std::move(device),
                                      request.largest_count, identity);
}

}  // namespace

// A group whose communicator is being made; shared with the thread that makes it.
class GroupMaker::MakingState {
 public:
  MakingState(GroupRequest r, Clock::time_point deadline) : request(std::move(r)), deadline_(deadline) {}

  void made(std::shared_ptr<Channel> channel) {
    if (settle()) request.made(std::move(channel));  // too late, it is left alone: to free it takes all its members
  }
  void failed(const std::string& why, bool timed_out) {
    if (settle()) request.failed(why, timed_out);
  }
  // The thread has returned from MPI.
  void returns() {
    const std::lock_guard lock(mutex_);
    returned_ = true;
    changed_.notify_all();
  }
  bool await(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return returned_; });
  }
  void check_deadline() {
    if (Clock::now() < deadline_) return;
    failed("its members had all called new_group, but not all of them took part in making it (stopped, or gone?)",
           true);
  }

  const GroupRequest request;

 private:
  bool settle() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(settled_, true);
  }

  const Clock::time_point deadline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool settled_ = false;   // guarded by mutex_; the requester has been told
  bool returned_ = false;  // guarded by mutex_
};

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
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
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
    to_free.clear();  // and their memory, now: the next look at this list may be far
    pending_.remove_if([this](Pending& pending) { return !look(pending); });
    const bool made = make_complete();
    for (const Making& making : making_) making->check_deadline();
    making_.remove_if([](const Making& making) { return making->await(0ms); });
    if (made || !fresh.empty()) pause = kShortestPause;

    lock.lock();
    const auto woken = [this] { return stopping_ || !requests_.empty() || !starts_.empty() || !to_free_.empty(); };
    if (pending_.empty() && making_.empty()) {
      changed_.wait(lock, woken);
    } else if (!made) {
      changed_.wait_for(lock, pause, woken);
      pause = std::min(pause * 2, kLongestPause);
    }
  }
  ended_ = true;
  changed_.notify_all();
}

// Announces the group, and reads its place in the order once it is complete, or who has given it up. False when it has
// failed.
bool GroupMaker::look(Pending& pending) {
  try {
    if (pending.keys.empty()) {
      ensure_started(pending.request.world);
      announce(pending);
    }
    auto& store = *pending.request.world.store;
    if (pending.order == 0) pending.order = store.add(pending.keys + "order", 0);
    if (pending.order == 0 && Clock::now() >= pending.deadline) {
      const std::string missing = missing_members(pending);
      // Settled by another who has not said how: it is about to, or it has died in between.
      const bool settled = settle(pending, kGivenUp - pending.request.rank);
      if (settled || Clock::now() >= pending.deadline + kSettling) {
        pending.request.failed(
            "not every rank of the group has made it within its time-out: " +
                (missing.empty() ? "all have come, but one of them has ended or stopped meanwhile"
                                 : missing + " did not come (they have not called new_group for these "
                                             "ranks, or fewer times than the others)"),
            true);
        return false;
      }
    }
    if (pending.order > kGivenUp) return true;
    const int rank = pending.request.ranks[static_cast<size_t>(kGivenUp - pending.order)];
    const std::string missing = missing_members(pending);
    pending.request.failed(
        "rank " + std::to_string(rank) + " has given it up, since " +
            (missing.empty() ? "a member did not come in time (by now all have)" : missing + " did not come in time"),
        false);
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
  store.set(pending.keys + "member/" + self, "1");
  if (store.add(pending.keys + "members", 1) != static_cast<int64_t>(ranks.size())) return;
  // The last one to come draws the group's place in the order in which complete groups are made.
  settle(pending, store.add(bootstrap::attempt_prefix() + "group/order", 1));
}

// Complete or given up: one of them for all members, so that whoever comes late does not begin what the others have
// given up, and the next group of these members finds all of them at the same count. False when it was settled before.
bool GroupMaker::settle(Pending& pending, int64_t order) {
  auto& store = *pending.request.world.store;
  if (store.add(pending.keys + "settled", 1) != 1) return false;
  pending.order = store.add(pending.keys + "order", order);
  return true;
}

// Makes the complete groups in their order. All ranks go by the same order, so of all groups being made the first is
// always first for each of its members: nobody waits in a circle. A group whose members are all counted but whose place
// is not published yet may come before; one that is not counted in full will draw a later place.
bool GroupMaker::make_complete() {
  std::list<Pending> complete;
  for (auto it = pending_.begin(); it != pending_.end();) {
    const auto at = it++;
    // Groups of the same members are duplicates of one communicator, hence made one after the other.
    const bool waits = std::any_of(making_.begin(), making_.end(),
                                   [&](const Making& making) { return making->request.ranks == at->request.ranks; });
    if (at->order != 0 && !waits) complete.splice(complete.end(), pending_, at);
  }
  if (complete.empty()) return false;
  const bool sure = std::none_of(pending_.begin(), pending_.end(), [](const Pending& other) {
    try {
      const auto members = static_cast<int64_t>(other.request.ranks.size());
      return other.order == 0 && other.request.world.store->add(other.keys + "members", 0) == members;
    } catch (const std::exception&) {
      return false;  // it has no way to its place; look() says so
    }
  });
  if (!sure) {
    pending_.splice(pending_.end(), complete);
    return false;
  }
  complete.sort([](const Pending& a, const Pending& b) { return a.order < b.order; });
  while (!complete.empty()) {
    const std::vector<int> ranks = complete.front().request.ranks;
    const bool made = make_one(std::move(complete.front()));
    complete.pop_front();
    if (made) continue;
    for (auto it = complete.begin(); it != complete.end();) {
      const auto at = it++;
      if (at->request.ranks == ranks) pending_.splice(pending_.end(), complete, at);
    }
  }
  return true;
}

// On a thread of its own, since MPI waits without a deadline for a member that has stopped or died on the way. One that
// does not come soon is left to that thread, and the next group is begun: not in a circle either, each has a thread.
bool GroupMaker::make_one(Pending pending) {
  // Falling: Open MPI lets a creation that does not end hold up those with a higher tag.
  const int tag = static_cast<int>(kTags - 1 - pending.order % kTags);
  auto making = std::make_shared<MakingState>(std::move(pending.request), pending.deadline);
  const auto make = [making, tag, identity = text_hash(pending.keys), this] {
    prctl(PR_SET_TIMERSLACK, kTimerSlack);
    try {
      making->made(make_channel(making->request, parent_of(making->request.ranks, tag), identity, shared_));
    } catch (const std::exception& error) {
      making->failed(error.what(), false);
    }
    making->returns();
  };
  try {
    bootstrap::start_thread("mc-making", make).detach();
  } catch (const std::system_error& error) {
    making->failed(std::string("no thread for it: ") + error.what(), false);
    return true;
  }
  if (making->await(kMakingPatience)) return true;
  making_.push_back(making);
  return false;
}

// The communicator that all groups of these members are duplicates of. Kept: a duplicate can be waited for asleep,
// while MPI_Comm_create_group spins, which on a crowded machine takes 10 to 100 times as long.
MPI_Comm GroupMaker::parent_of(const std::vector<int>& ranks, int tag) {
  {
    const std::lock_guard lock(parents_mutex_);
    if (const auto found = parents_.find(ranks); found != parents_.end()) return found->second;
  }
  const auto* runtime = bootstrap::MpiRuntime::current();
  MPI_Comm made = MPI_COMM_NULL;
  std::vector<int> everybody(static_cast<size_t>(runtime->size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  if (ranks == everybody) {
    made = runtime->world();
  } else {
    const CommGroup group(runtime->world(), ranks);
    check(MPI_Comm_create_group(runtime->world(), group.get(), tag, &made), "MPI_Comm_create_group");
    check(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  const std::lock_guard lock(parents_mutex_);
  return parents_[ranks] = made;
}

// "rank 1, 2"; empty when nobody is missing.
std::string GroupMaker::missing_members(Pending& pending) const {
  std::string text;
  for (size_t r = 0; r < pending.request.ranks.size(); ++r) {
    if (pending.request.world.store->check(pending.keys + "member/" + std::to_string(r))) continue;
    text += (text.empty() ? "rank " : ", ") + std::to_string(pending.request.ranks[r]);
  }
  return text;
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
      lock.unlock();
      if (auto* runtime = bootstrap::MpiRuntime::current()) runtime->shutdown(bound, true);
      return;
    }
    lock.unlock();
    thread_.join();
    work_pending = work_pending || !making_.empty();
  } else {
    lock.unlock();
  }
  if (auto* runtime = bootstrap::MpiRuntime::current()) runtime->shutdown(bound, work_pending);
}

}  // namespace multicomm::mpi
