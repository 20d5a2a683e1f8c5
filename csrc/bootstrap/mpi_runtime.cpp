#include "bootstrap/mpi_runtime.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "bootstrap/background.h"
#include "bootstrap/mpi_world.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A rank that leaves an mpirun job without MPI_Finalize ends the job, so the others get more time.
constexpr std::chrono::minutes kLauncherBound{10};
constexpr std::chrono::minutes kDefaultTimeout{5};
// A peer may end right after the step in which we are; what then completes is complete.
constexpr std::chrono::seconds kGrace{1};

std::mutex start_mutex;
std::string broken;  // guarded by start_mutex: why MPI cannot be started in this process any more
std::atomic<MpiRuntime*> runtime{nullptr};  // lives to the end of the process: other threads may be in MPI

// Whether a peer has been known to be dead for a moment: what waits for it does not come to an end.
std::function<bool()> peer_gone(const PmixNode* node) {
  return [node, since = std::optional<Clock::time_point>()]() mutable {
    if (node == nullptr || node->dead_ranks().empty()) return false;
    if (!since) since = Clock::now();
    return Clock::now() - *since >= kGrace;
  };
}

// "ranks 1, 2 have ended", or what is the matter otherwise.
std::string dead_or(const PmixNode* node, const std::string& otherwise) {
  const std::vector<int> dead = node == nullptr ? std::vector<int>() : node->dead_ranks();
  if (!dead.empty()) return name_ranks(dead) + (dead.size() == 1 ? " has ended" : " have ended");
  const std::string trouble = node == nullptr ? std::string() : node->trouble();
  return trouble.empty() ? otherwise : otherwise + "; " + trouble;
}

// A connection breaks before the word of a death is round: gives the word a moment to come.
void await_word(const PmixNode* node) {
  for (const auto end = Clock::now() + kGrace; node != nullptr && node->dead_ranks().empty() && Clock::now() < end;) {
    std::this_thread::sleep_for(5ms);
  }
}

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time.count()) / 1000);
  return text;
}

// A rank has two busy threads at times, its own and the maker or the coordinator. Where they outnumber the cores, a
// thread that spins inside MPI keeps the very peer from running that it waits for: making a group then takes seconds.
void yield_where_crowded(int local_size, ScopedEnvironment& environment) {
  if (2 * local_size > available_cores()) environment.set_default("OMPI_MCA_mpi_yield_when_idle", "1");
}

}  // namespace

void check_launcher(int rank, int world_size) {
  if (MpiRuntime* made = MpiRuntime::current()) {
    return compare_worlds(rank, world_size, made->rank(), made->size(), made->provider() == Provider::kPreinitialised);
  }
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (initialised != 0 && finalised == 0) {
    int mpi_rank = 0, mpi_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi_size);
    compare_worlds(rank, world_size, mpi_rank, mpi_size, true);
  } else if (launched_by_mpi()) {
    const char* mpi_rank = std::getenv("OMPI_COMM_WORLD_RANK");
    const char* mpi_size = std::getenv("OMPI_COMM_WORLD_SIZE");
    if (mpi_rank != nullptr && mpi_size != nullptr)
      compare_worlds(rank, world_size, std::atoi(mpi_rank), std::atoi(mpi_size), false);
  }
}

MpiRuntime& start_from_mpi() {
  int initialised = 0;
  MPI_Initialized(&initialised);
  if (initialised == 0 && !launched_by_mpi()) {
    throw BootstrapError(
        "init_method=\"mpi://\" asks MPI for rank and world size, but no MPI launcher has started this process. Launch "
        "with mpirun or "
        "srun --mpi=pmix, or use torchrun and the default init_method");
  }
  WorldRequest request;
  request.rank = kFromMpi;
  return MpiRuntime::start(request);
}

std::string broadcast_text(const MpiRuntime& runtime, const std::string& text) {
  char buffer[1024] = {};
  text.copy(buffer, sizeof(buffer) - 1);
  const int code = MPI_Bcast(buffer, sizeof(buffer), MPI_BYTE, 0, runtime.world());
  if (code != MPI_SUCCESS)
    throw BootstrapError("MPI_Bcast of the store's address failed with code " + std::to_string(code));
  return buffer;
}

bool launched_by_mpi() {
  if (std::getenv("TORCHELASTIC_RUN_ID") != nullptr) return false;
  return (std::getenv("PMIX_RANK") != nullptr && std::getenv("PMIX_NAMESPACE") != nullptr) ||
         std::getenv("PMI_RANK") != nullptr;
}

MpiRuntime* MpiRuntime::current() {
  MpiRuntime* made = runtime.load();
  return made != nullptr && made->pid_ == getpid() ? made : nullptr;
}

MpiRuntime& MpiRuntime::start(const WorldRequest& request) {
  const std::lock_guard lock(start_mutex);
  if (MpiRuntime* made = runtime.load()) {
    if (made->pid_ != getpid()) throw BootstrapError("MPI was started in the parent of this forked process");
    if (made->shut_down_.load())
      throw BootstrapError("MPI has been shut down in this process; it cannot be started twice");
    compare_worlds(request.rank, request.world_size, made->rank_, made->size_,
                   made->provider_ == Provider::kPreinitialised);
    return *made;
  }
  if (!broken.empty()) throw BootstrapError(broken);
  runtime.store(new MpiRuntime(request));
  return *runtime.load();
}

MpiRuntime::MpiRuntime(const WorldRequest& request) : pid_(getpid()) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (finalised != 0) throw BootstrapError("MPI has been finalised in this process; it cannot be started twice");
  ScopedEnvironment environment;
  if (initialised != 0) {
    provider_ = Provider::kPreinitialised;
    check_threads();  // with less, make_world's thread may not call MPI
  } else {
    prepare(request, environment);
  }
  try {
    make_world(request);
  } catch (const std::exception& error) {
    // MPI cannot be initialised twice. The server stays: without it the other ranks' MPI_Init would end their
    // processes.
    broken = error.what();
    (void)node_.release();
    throw;
  }
}

// Chooses who provides MPI's world, and sets what MPI_Init shall find in the environment.
void MpiRuntime::prepare(const WorldRequest& request, ScopedEnvironment& environment) {
  // Where the user has not decided: the fabrics that these two probe cost a second at start and are not used by us;
  // they print warnings where they fail.
  const bool btl_chosen = std::getenv("OMPI_MCA_btl") != nullptr;
  environment.set_default("OMPI_MCA_btl", "^ofi");
  environment.set_default("OMPI_MCA_osc", "^ucx");
  // An MPI_Init that fails, and errors that belong to no communicator, shall be errors of ours and not the process's
  // end.
  environment.set_default("OMPI_MCA_mpi_initial_errhandler", "mpi_errors_return");
  const std::string prefix = relocated_prefix();
  if (!prefix.empty()) environment.set_default("OPAL_PREFIX", prefix);

  if (launched_by_mpi()) {
    provider_ = Provider::kLauncher;
    const char* local_size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    yield_where_crowded(local_size == nullptr ? 1 : std::atoi(local_size), environment);
    return;
  }
  // Variables of a launcher that started our launcher would lead MPI to its server instead of ours.
  environment.hide(is_launcher_variable);
  try {
    if (!request.store) throw BootstrapError("no store to start MPI with");
    node_ = std::make_unique<PmixNode>(request.store, request.rank, request.world_size,
                                       request.timeout > 0ms ? request.timeout : kDefaultTimeout,
                                       request.server_executable);
  } catch (const std::exception& error) {
    if (request.world_size > 1) throw BootstrapError(error.what());
    // One process needs no server to have a world; only its MPI's temporary files are left behind by a singleton.
    provider_ = Provider::kSingleton;
    return;
  }
  provider_ = Provider::kPmixServer;
  for (const auto& [name, value] : node_->environment()) environment.set(name, value);
  // Between nodes Open MPI ends this process, with no word, when a connection breaks because a peer has gone without
  // MPI_Finalize; in this mode its operations return errors instead. Inside a node shared memory does not break.
  if (node_->nodes() > 1) environment.set_default("OMPI_MCA_mpi_ft_enable", "1");
  // On one node nobody needs to reach the ranks over the network, where Open MPI would listen on every interface.
  else if (!btl_chosen) environment.set("OMPI_MCA_btl", "^ofi,tcp");
  yield_where_crowded(node_->local_size(), environment);
}

// MPI_Init_thread and MPI_Comm_dup wait for every rank without a deadline of their own, hence on a thread that can be
// left behind.
void MpiRuntime::make_world(const WorldRequest& request) {
  struct Made {
    MPI_Comm world = MPI_COMM_NULL;
    MPI_Comm inquiries = MPI_COMM_NULL;
    int rank = 0;
    int size = 1;
    std::vector<Peer> peers;
  };
  auto made = std::make_shared<Made>();
  const bool preinitialised = provider_ == Provider::kPreinitialised;
  const auto call = [made, preinitialised, rank = request.rank, size = request.world_size] {
    if (!preinitialised) init_mpi();
    check_threads();
    MPI_Comm_rank(MPI_COMM_WORLD, &made->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &made->size);
    compare_worlds(rank, size, made->rank, made->size, preinitialised);
    made->world = duplicate_world(preinitialised);
    made->inquiries = duplicate_world(preinitialised);
    made->peers = exchange_peers(made->inquiries);
    connect_barrier(made->world);
  };
  const std::chrono::milliseconds timeout = request.timeout > 0ms ? request.timeout : kDefaultTimeout;
  try {
    if (!call_bounded("mc-mpi-init", Clock::now() + timeout, call, peer_gone(node_.get()))) {
      throw BootstrapError("MPI could not be started: " +
                           dead_or(node_.get(), "not every rank has come to MPI_Init within " + seconds_text(timeout)));
    }
  } catch (const MpiError& error) {
    await_word(node_.get());
    throw BootstrapError("MPI could not be started: " + dead_or(node_.get(), error.what()));
  }
  world_ = made->world;
  inquiries_ = made->inquiries;
  rank_ = made->rank;
  size_ = made->size;
  peers_ = std::move(made->peers);
}

std::vector<int> MpiRuntime::dead_ranks() const {
  return node_ != nullptr && getpid() == pid_ ? node_->dead_ranks() : std::vector<int>();
}

std::string MpiRuntime::trouble() const {
  return node_ != nullptr && getpid() == pid_ ? node_->trouble() : std::string();
}

std::string MpiRuntime::describe() const {
  switch (provider_) {
    case Provider::kLauncher: return "MPI launcher";
    case Provider::kPreinitialised: return "MPI initialised by somebody else";
    case Provider::kPmixServer: return "own PMIx server on each of " + std::to_string(node_->nodes()) + " node(s)";
    case Provider::kSingleton: return "MPI singleton";
  }
  return {};
}

// Empty when every rank has come here; else why not.
std::string MpiRuntime::await_all(std::chrono::milliseconds bound) {
  if (!dead_ranks().empty()) return dead_or(node_.get(), {});
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_Ibarrier(world_, &request);
  const auto deadline = Clock::now() + bound;
  const auto gone = peer_gone(node_.get());
  auto pause = 50us;
  while (code == MPI_SUCCESS) {
    int done = 0;
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);  // an error completes the request, too
    if (code == MPI_SUCCESS && done != 0) return {};
    if (Clock::now() >= deadline || gone()) {
      return dead_or(node_.get(), "not every rank has come to its end within " + seconds_text(bound));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 2, 5ms);
  }
  await_word(node_.get());
  return dead_or(node_.get(), "the connection to another rank is broken");
}

// A rank may still die between the barrier and the end of MPI_Finalize, which then waits for it for ever.
void MpiRuntime::finalise(std::chrono::milliseconds bound) {
  const auto call = [world = world_, inquiries = inquiries_]() mutable {
    MPI_Comm_free(&inquiries);
    MPI_Comm_free(&world);
    MPI_Finalize();
  };
  if (!call_bounded("mc-finalize", Clock::now() + bound, call, peer_gone(node_.get()))) {
    return leave_unfinalised("given up", dead_or(node_.get(), "it did not return within " + seconds_text(bound)));
  }
  if (node_) node_->finish();
}

void MpiRuntime::leave_unfinalised(const char* what, const std::string& why) {
  std::fprintf(stderr, "multicomm: rank %d: MPI_Finalize %s: %s\n", rank_, what, why.c_str());
  // The server goes when its ranks are gone; waiting for it here would be waiting for ourselves.
  if (node_) node_->leave();
}

void MpiRuntime::shutdown(std::chrono::milliseconds bound, bool work_pending) noexcept {
  if (getpid() != pid_ || shut_down_.exchange(true)) return;
  try {
    int finalised = 0;
    MPI_Finalized(&finalised);
    if (finalised != 0) {
      if (node_) node_->finish();
      return;
    }
    if (provider_ == Provider::kPreinitialised) {  // what others started, others end
      if (!work_pending) {
        MPI_Comm_free(&inquiries_);
        MPI_Comm_free(&world_);
      }
      return;
    }
    if (work_pending) return leave_unfinalised("skipped", dead_or(node_.get(), "operations or groups are unfinished"));
    if (provider_ == Provider::kLauncher) bound = std::max<std::chrono::milliseconds>(bound, kLauncherBound);
    if (const std::string why = await_all(bound); !why.empty()) return leave_unfinalised("skipped", why);
    finalise(bound);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "multicomm: rank %d: at MPI's shutdown: %s\n", rank_, error.what());
  }
}

}  // namespace multicomm::bootstrap
