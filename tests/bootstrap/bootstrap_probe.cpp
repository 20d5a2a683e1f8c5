// One rank of a start-up test:  bootstrap_probe MODE RANK SIZE STORE_FOLDER SERVER TIMEOUT_MS [ARGUMENT]
// What it finds goes to stdout, a fact a line; exit status 3 is a BootstrapError, with its text on stdout.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bootstrap/mpi_runtime.h"
#include "directory_store.h"

namespace {

using namespace std::chrono_literals;
using multicomm::bootstrap::BootstrapError;
using multicomm::bootstrap::MpiRuntime;
using multicomm::bootstrap::WorldRequest;
using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& text) {
  std::printf("failed: %s\n", text.c_str());
  std::fflush(stdout);
  _exit(1);
}
void require(bool ok, const std::string& text) {
  if (!ok) fail(text);
}

MPI_Comm subset(MPI_Comm world, const std::vector<int>& ranks, int tag) {
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm_group(world, &all);
  MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
  MPI_Comm made = MPI_COMM_NULL;
  require(MPI_Comm_create_group(world, some, tag, &made) == MPI_SUCCESS, "MPI_Comm_create_group");
  MPI_Group_free(&all);
  MPI_Group_free(&some);
  return made;
}

int sum_of(MPI_Comm comm, int value) {
  int sum = 0;
  require(MPI_Allreduce(&value, &sum, 1, MPI_INT, MPI_SUM, comm) == MPI_SUCCESS, "MPI_Allreduce");
  return sum;
}

// Whole world, a subset made by its members alone, shared memory inside the node.
void use(const MpiRuntime& runtime) {
  const int rank = runtime.rank(), size = runtime.size();
  require(sum_of(runtime.world(), rank + 1) == size * (size + 1) / 2, "sum over the world");
  if (size > 2 && rank != 1) {
    std::vector<int> ranks;
    for (int r = size - 1; r >= 0; --r)
      if (r != 1) ranks.push_back(r);
    MPI_Comm comm = subset(runtime.world(), ranks, 77);
    require(sum_of(comm, 1) == size - 1, "sum over a subset");
    MPI_Comm_free(&comm);
  }
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(runtime.world(), MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  std::printf("on_node %d\n", sum_of(node, 1));
  void* memory = nullptr;
  MPI_Win window = MPI_WIN_NULL;
  require(MPI_Win_allocate_shared(1 << 16, 1, MPI_INFO_NULL, node, &memory, &window) == MPI_SUCCESS, "shared window");
  std::memset(memory, rank, 1 << 16);
  std::printf("window ok\n");
  // The window and its communicator are left open: whoever is killed now must leave nothing behind.
  static MPI_Win kept_window = window;
  static MPI_Comm kept_node = node;
  (void)kept_window, (void)kept_node;
}

void print_environment() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    for (const char* prefix : {"PMIX_", "PMI_", "OMPI_", "OPAL_", "PRTE_"})
      if (text.starts_with(prefix)) std::printf("environment %s\n", *entry);
  }
}

// Files in shared memory that this rank has mapped; the test looks whether they are still there at the end.
void print_segments() {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> seen;
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find("/dev/shm/");
    if (at == std::string::npos || line.ends_with("(deleted)")) continue;
    if (seen.insert(line.substr(at)).second) std::printf("segment %s\n", line.substr(at).c_str());
  }
}

void await_dead(const MpiRuntime& runtime, int rank) {
  const auto begin = Clock::now();
  while (Clock::now() - begin < 10s) {
    const std::vector<int> dead = runtime.dead_ranks();
    if (std::count(dead.begin(), dead.end(), rank) > 0) {
      std::printf("saw_dead %d after %.3f s\n", rank, std::chrono::duration<double>(Clock::now() - begin).count());
      return;
    }
    std::this_thread::sleep_for(5ms);
  }
  fail("rank " + std::to_string(rank) + " is not known to be dead");
}

void check_child(const MpiRuntime& runtime, const WorldRequest& request) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      MpiRuntime::start(request);
    } catch (const BootstrapError&) {
      refused = true;
    }
    const bool hidden = MpiRuntime::current() == nullptr && runtime.dead_ranks().empty();
    const_cast<MpiRuntime&>(runtime).shutdown(10s, false);
    _exit(refused && hidden ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  require(status == 0, "the forked child has touched MPI");
  std::printf("fork ok\n");
}

void hold() {
  std::printf("ready\n");
  std::fflush(stdout);
  char byte;
  while (read(STDIN_FILENO, &byte, 1) < 0) continue;  // until the test closes it
}

int run(const std::string& mode, WorldRequest request, int argument) {
  if (mode == "preinitialised") {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, argument, &provided);
  }
  const auto begin = Clock::now();
  if (mode == "retry") {  // until the late rank has come
    bool failed = false;
    try {
      MpiRuntime::start(request);
    } catch (const BootstrapError& error) {
      failed = true;
      std::printf("first_try %s\n", error.what());
    }
    require(failed != (request.rank == argument), "only the late rank starts at its first try");
  }
  MpiRuntime& runtime = MpiRuntime::start(request);
  std::printf("start %.3f s\ndescribe %s\n", std::chrono::duration<double>(Clock::now() - begin).count(),
              runtime.describe().c_str());
  require(&MpiRuntime::start(request) == &runtime && MpiRuntime::current() == &runtime, "one runtime per process");
  print_environment();
  use(runtime);
  print_segments();

  const bool faulty = runtime.rank() == argument;
  if (mode == "hold") {
    hold();
  } else if (mode == "survive") {  // the rank named by the argument is killed by the test; the others watch it go
    hold();
    await_dead(runtime, argument);
  } else if (mode == "raise" && faulty) {
    std::fflush(stdout);
    std::exit(5);  // as a rank that ends by an error of its own: no shutdown
  } else if (mode == "raise") {
    await_dead(runtime, argument);
  } else if (mode == "pending" && faulty) {
    runtime.shutdown(2s, true);
    return 0;
  } else if (mode == "fork") {
    check_child(runtime, request);
  } else if (mode == "finalised") {
    MPI_Finalize();
  } else if (mode == "late_shutdown" && faulty) {
    std::this_thread::sleep_for(4s);
  } else if (mode == "die_in_finalize" && faulty) {
    // Passes the barrier that precedes MPI_Finalize, then vanishes.
    MPI_Request barrier = MPI_REQUEST_NULL;
    MPI_Ibarrier(runtime.world(), &barrier);
    MPI_Wait(&barrier, MPI_STATUS_IGNORE);
    std::fflush(stdout);
    raise(SIGKILL);
  }
  const auto end = Clock::now();
  runtime.shutdown(2s, false);
  runtime.shutdown(2s, false);
  int finalised = 0;
  MPI_Finalized(&finalised);
  std::printf("shut down in %.3f s, finalised %d\n", std::chrono::duration<double>(Clock::now() - end).count(),
              finalised);
  if (mode == "preinitialised") MPI_Finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  WorldRequest request;
  request.rank = std::atoi(argv[2]);
  request.world_size = std::atoi(argv[3]);
  if (request.rank < 0) {  // whatever the launcher says
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    request.rank = rank == nullptr ? 0 : std::atoi(rank);
  }
  request.store = std::make_shared<DirectoryStore>(argv[4]);
  request.server_executable = argv[5];
  request.timeout = std::chrono::milliseconds(std::atoi(argv[6]));
  try {
    return run(argv[1], request, argc > 7 ? std::atoi(argv[7]) : -1);
  } catch (const BootstrapError& error) {
    std::printf("error %s\n", error.what());
    return 3;
  }
}
