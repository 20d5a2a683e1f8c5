#include "process_group/runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "coordinator/error_text.h"
#include "transport/device/group_plane.h"

extern char** environ;

namespace multicomm {
namespace {

constexpr std::chrono::seconds kFailedBound{1};
constexpr std::chrono::minutes kLauncherBound{10};
constexpr std::chrono::seconds kDeviceBound{2};
constexpr std::chrono::seconds kTraceBound{2};

std::mutex runtime_mutex;
std::atomic<Runtime*> runtime{nullptr};  // leaked on purpose, see Runtime::get

// Ranks of this node against cores, as far as the launcher tells.
bool oversubscribed() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return true;
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "WORLD_SIZE"}) {
    if (const char* value = std::getenv(name)) return std::atoi(value) > CPU_COUNT(&cores);
  }
  return true;  // unknown: yielding costs little, starving a peer costs much
}

// Whether tensors on a device may come. Without asking the device's driver, which is not to be woken by programs that
// use none.
bool device_at_hand() {
  if (at::isPrivateUse1HooksRegistered()) return true;
  return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

std::function<void()>& interrupt_check_slot() {
  static auto* check = new std::function<void()>();
  return *check;
}

}  // namespace

Runtime& Runtime::get() {
  if (Runtime* made = runtime.load()) {
    made->check_process();
    return *made;
  }
  const std::lock_guard lock(runtime_mutex);
  if (runtime.load() == nullptr) runtime.store(new Runtime());
  return *runtime.load();
}

Runtime* Runtime::if_made() { return runtime.load(); }

void Runtime::check_process() const {
  if (getpid() != pid_) {
    throw std::runtime_error(
        "multicomm: this process was forked from one that uses multicomm; MPI and its threads do not survive a fork. "
        "Start "
        "workers with the 'spawn' method, or before the first process group.");
  }
}

Runtime::Runtime()
    : pid_(getpid()),
      coordinator_(read_settings(environ), shared_, completions_),
      driver_(coordinator_, completions_, oversubscribed()),
      inspection_(coordinator_, driver_, settings().inspect_signal),
      maker_(shared_, [this] { start_inquiries(); }) {
  launchers_ = std::make_unique<device::Launchers>(settings().cuda_high_priority, [this] { driver_.wake(); });
  coordinator_.post([this] { shared_.pollers.attach(launchers_->reports()); });
  shared_.has_device = &device_at_hand;
  shared_.make_device = [this](const mpi::GroupDeviceParts& parts) {
    return std::make_unique<device::GroupPlane>(parts, settings(), *launchers_);
  };
  coordinator_.on_channel_released = [this](std::shared_ptr<Channel> channel) { maker_.free(std::move(channel)); };
}

void Runtime::start_inquiries() {
  const auto* mpi = bootstrap::MpiRuntime::current();
  inspection_.started(mpi->rank(), mpi->size(), bootstrap::job_identity(mpi->peers()));
  coordinator_.post([this, mpi] {
    const auto peer = [mpi](int rank) -> const bootstrap::Peer& { return mpi->peers()[static_cast<size_t>(rank)]; };
    mpi::World world;
    world.rank = mpi->rank();
    world.size = mpi->size();
    world.dead_ranks = [mpi] { return mpi->dead_ranks(); };
    world.place_of = [peer](int rank) { return bootstrap::place_text(peer(rank)); };
    world.seen_of = [peer](int rank) { return bootstrap::seen_text(peer(rank)); };
    inquiries_ = std::make_unique<mpi::Inquiries>(mpi->inquiries(), shared_.requests, coordinator_, std::move(world));
    coordinator_.set_inquiries(inquiries_.get());
  });
  driver_.wake();
}

void Runtime::start(bootstrap::WorldRequest request) {
  joins(request.rank, request.world_size);
  maker_.start(std::move(request));
}

// Where this process's rank is known first.
void Runtime::joins(int rank, int world_size) {
  inspection_.joins(rank, world_size);
  std::call_once(joined_, [&] {  // tried again when it throws: a group must not be made without what was asked for
    if (!settings().timeline.empty()) start_timeline(settings().timeline, rank, world_size);
  });
}

std::string Runtime::start_timeline(const std::string& folder, int rank, int world_size) {
  check_process();
  try {
    std::string path = timeline_.start(folder, {rank, world_size, bootstrap::place_text(bootstrap::this_process())});
    coordinator_.set_trace(&timeline_);
    return path;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string("multicomm: timeline: ") + error.what());
  }
}

void Runtime::stop_timeline() {
  check_process();
  if (coordinator_.trace() == nullptr) return;
  const auto over = std::make_shared<std::atomic<bool>>(false);
  coordinator_.post([this, over] {
    for (const GroupPtr& group : coordinator_.groups()) group->trace_unfinished();
    coordinator_.set_trace(nullptr);
    over->store(true);
  });
  driver_.wake();
  driver_.wait_until([&] { return over->load(); }, Operation::Clock::now() + kTraceBound);
  coordinator_.set_trace(nullptr);  // also when the coordinator is stuck in MPI
  timeline_.stop();
}

void Runtime::describe_group(const GroupPtr& group, const std::string& description) {
  timeline_.describe(group->number(), description);
}

GroupPtr Runtime::make_group(GroupInfo info, mpi::GroupRequest request) {
  check_process();
  joins(request.world.rank, request.world.world_size);
  GroupPtr group = coordinator_.add_group(std::move(info));
  request.shared_settings = settings().shared_text();
  request.largest_count = static_cast<int64_t>(settings().chunk_elements);
  request.made = [this, group](std::shared_ptr<Channel> channel) {
    coordinator_.post([group, channel = std::move(channel)] { group->connect(channel); });
    driver_.wake();
  };
  request.failed = [this, group](const std::string& why, bool timed_out) {
    coordinator_.post([group, why, timed_out] { group->not_made(not_made_error(group->info(), why, timed_out)); });
    driver_.wake();
  };
  maker_.make(std::move(request));
  return group;
}

void Runtime::leave_group(const GroupPtr& group, std::chrono::milliseconds bound) {
  if (getpid() != pid_ || group->closed()) return;
  if (bound.count() > 0 && group->busy()) {
    Operation::Clock::time_point until;
    {
      const std::lock_guard lock(leave_mutex_);
      const auto now = Operation::Clock::now();
      if (now > leave_until_ + bound) leave_until_ = now + bound;
      until = leave_until_;
    }
    if (driver_.wait_until([&] { return !group->busy(); }, until)) {
      const std::lock_guard lock(leave_mutex_);
      leave_until_ = {};  // only what was waited for in vain is shared
    } else {
      left_work_.store(true);
    }
  }
  coordinator_.post([group] { group->leave(); });
  driver_.wake();
}

void Runtime::abort_group(const GroupPtr& group, const std::string& reason) {
  if (getpid() != pid_) return;
  coordinator_.post([group, reason] { group->give_up(aborted_error(group->info(), reason)); });
  driver_.wake();
}

void Runtime::set_timeout(const GroupPtr& group, std::chrono::milliseconds timeout) {
  if (getpid() != pid_) return;
  coordinator_.post([group, timeout] { group->set_timeout(timeout); });
  driver_.wake();
}

void Runtime::end_process(bool failed) noexcept {
  if (Runtime* made = if_made()) return made->shutdown(failed);
  // MPI may have been started without a group, by init_method="mpi://".
  if (auto* mpi = bootstrap::MpiRuntime::current()) mpi->shutdown(Settings().shutdown_timeout, failed);
}

// Whether all its members can still take leave of each other.
bool Runtime::can_part(const GroupState& group) const {
  const auto* mpi = bootstrap::MpiRuntime::current();
  const std::vector<int> dead = mpi == nullptr ? std::vector<int>() : mpi->dead_ranks();
  const auto& ranks = group.info().ranks;
  return std::find_first_of(ranks.begin(), ranks.end(), dead.begin(), dead.end()) == ranks.end();
}

void Runtime::shutdown(bool failed) noexcept {
  if (getpid() != pid_ || shut_down_.exchange(true)) return;
  try {
    using std::chrono::milliseconds;
    const milliseconds bound = settings().shutdown_timeout;
    bool healthy = !failed && !left_work_.load();
    for (const GroupPtr& group : coordinator_.groups()) {
      const ErrorPtr failure = group->failure();
      if (failure && failure->kind != ErrorKind::kAborted && failure->kind != ErrorKind::kUsage) healthy = false;
      if (group->device_given_up()) healthy = false;
    }
    // With a group given up its members may never come; the rest still gets a moment to part in order. Under an MPI
    // launcher a rank that ends early waits for the others, since leaving without MPI_Finalize ends the job.
    const milliseconds patience = !healthy                       ? std::min<milliseconds>(bound, kFailedBound)
                                  : bootstrap::launched_by_mpi() ? std::max<milliseconds>(bound, kLauncherBound)
                                                                 : bound;
    const auto deadline = Operation::Clock::now() + patience;
    const auto over = [&](const auto& is_over) {
      const auto groups = coordinator_.groups();
      return std::none_of(groups.begin(), groups.end(),
                          [&](const GroupPtr& group) { return can_part(*group) && !is_over(*group); });
    };
    // What is under way and waited for by nobody gets its chance first, unless the program has failed.
    if (healthy) {
      const auto done = [&] { return over([](const GroupState& group) { return !group.busy(); }); };
      driver_.wait_until(done, deadline - patience / 3);
    }
    for (const GroupPtr& group : coordinator_.groups()) {
      coordinator_.post([group] {
        if (!group->leaving()) group->leave();
      });
    }
    driver_.wait_until([&] { return over([](const GroupState&) { return false; }); }, deadline);
    const bool parted = coordinator_.groups().empty();
    inspection_.stop();
    stop_timeline();
    driver_.stop();
    completions_.stop(kFailedBound);
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Operation::Clock::now());
    maker_.stop(std::max<milliseconds>(left, std::min<milliseconds>(bound, kFailedBound)), !parted);
    launchers_->reports().await_beside(kDeviceBound);  // they are in NCCL, which is about to be unloaded
  } catch (const std::exception& error) {
    std::fprintf(stderr, "multicomm: at shutdown: %s\n", error.what());
  }
}

void Runtime::set_interrupt_check(std::function<void()> check) { interrupt_check_slot() = std::move(check); }
const std::function<void()>& Runtime::interrupt_check() { return interrupt_check_slot(); }

}  // namespace multicomm
