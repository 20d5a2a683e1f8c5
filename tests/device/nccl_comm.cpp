// The life of a communicator, and errors.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl_double.h"
#include "nccl_reduce.h"

namespace multicomm::tests::nccl {
namespace {

thread_local const char t_self = 0;  // its address names the thread

Comm find(ncclComm_t handle) {
  const auto at = g.communicators.find(handle);
  return at == g.communicators.end() ? nullptr : at->second;
}

void forget(const Comm& comm) {
  close_region(comm->id);
  const std::scoped_lock lock(g.mutex);
  g.communicators.erase(comm.get());
}

template <typename Condition>
void wait_for(Condition&& condition) {
  std::unique_lock lock(g.mutex);
  g.changed.wait(lock, [&] { return g.exiting || condition(); });
}

std::string gpu_identity() {
  const char* given = std::getenv("NCCL_DOUBLE_GPU");
  return given != nullptr ? given : "process " + std::to_string(getpid());
}

// Takes this rank's place; empty, or why not.
std::string join(ncclComm& comm) {
  auto region = open_region(comm.id);
  if (region == nullptr) return "the process that made the unique id has gone, or has ended its communicator";
  int32_t ranks = 0;
  if (!region->ranks.compare_exchange_strong(ranks, comm.ranks) && ranks != comm.ranks)
    return "another member says that there are " + std::to_string(ranks) + " ranks, not " + std::to_string(comm.ranks);
  Member& me = region->member[comm.rank];
  if (me.claimed.exchange(1) != 0) return "rank " + std::to_string(comm.rank) + " is there already";
  std::snprintf(me.gpu, sizeof me.gpu, "%s", comm.gpu.c_str());
  comm.region = std::move(region);
  me.present.store(1, std::memory_order_release);
  return "";
}

bool all_present(const ncclComm& comm) {
  for (int r = 0; r < comm.ranks; ++r)
    if (comm.region->member[r].present.load(std::memory_order_acquire) == 0) return false;
  return true;
}

// All are there: as NCCL does, those with one GPU refuse, which the others notice.
void begin(ncclComm& comm) {
  const std::scoped_lock lock(g.mutex);
  if (comm.aborted()) return;
  for (int a = 0; a < comm.ranks; ++a) {
    for (int b = 0; b < a; ++b) {
      if (std::strcmp(comm.region->member[a].gpu, comm.region->member[b].gpu) != 0) continue;
      const std::string text = "Duplicate GPU detected: ranks " + std::to_string(b) + " and " + std::to_string(a) +
                               " are both on " + comm.region->member[a].gpu;
      return fail_communicator(comm, a == comm.rank || b == comm.rank ? ncclInvalidUsage : ncclRemoteError, text);
    }
  }
  comm.phase = Phase::kReady;
  comm.state = ncclSuccess;
  g.changed.notify_all();
}

void meet_in_background(const Comm& comm, bool fails, bool hangs) {
  in_background([comm, fails, hangs, joined = false]() mutable {
    if (comm->aborted()) return true;
    if (hangs) return false;
    std::string error = fails ? "injected: the communicator cannot be made" : "";
    if (error.empty() && !joined) error = join(*comm);
    joined = true;
    if (!error.empty()) {
      const std::scoped_lock lock(g.mutex);
      fail_communicator(*comm, ncclSystemError, error);
      return true;
    }
    if (!all_present(*comm)) return false;
    close_region(comm->id);  // nobody else will come
    begin(*comm);
    return true;
  });
}

ncclResult_t wait_for_meeting(const Comm& comm, ncclComm_t* handle) {
  wait_for([&] { return comm->state != ncclInProgress || comm->aborted(); });
  ncclResult_t state;
  {
    const std::scoped_lock lock(g.mutex);
    state = comm->state;
  }
  const bool stopped = comm->aborted() && (state == ncclSuccess || state == ncclInProgress);
  if (state == ncclSuccess && !stopped) return ncclSuccess;
  *handle = nullptr;
  forget(comm);
  return stopped ? fail(ncclInternalError, "init: aborted") : state;
}

ncclResult_t init(ncclComm_t* handle, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  if (handle == nullptr) return fail(ncclInvalidArgument, "init: no place for the communicator");
  *handle = nullptr;
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks)
    return fail(ncclInvalidArgument, "init: rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  int blocking = 1;
  if (config != nullptr) {
    if (config->magic != kConfigMagic || config->size < sizeof(ncclConfig_t))
      return fail(ncclInvalidArgument, "init: the configuration was not initialized");
    if (config->blocking != INT_MIN) blocking = config->blocking;
    if (blocking != 0 && blocking != 1) return fail(ncclInvalidArgument, "init: blocking is neither 0 nor 1");
  }
  auto comm = std::make_shared<ncclComm>();
  comm->ranks = ranks;
  comm->rank = rank;
  comm->blocking = blocking != 0;
  comm->id = id;
  comm->gpu = gpu_identity();
  bool fails, hangs;
  {
    const std::scoped_lock lock(g.mutex);
    fails = strikes(kFailInit);
    hangs = strikes(kFailHangInit);
    g.communicators[comm.get()] = comm;
  }
  *handle = comm.get();
  meet_in_background(comm, fails, hangs);
  if (!comm->blocking) return ncclInProgress;
  return wait_at_group_end([comm, handle] { return wait_for_meeting(comm, handle); });
}

void finalize_in_background(const Comm& comm) {
  {
    const std::scoped_lock lock(g.mutex);
    if (comm->state != ncclSuccess) return;  // it has just failed
    comm->phase = Phase::kFinalizing;
    comm->state = ncclInProgress;
  }
  in_background([comm] {
    const std::scoped_lock lock(g.mutex);
    if (comm->aborted()) return true;
    if (!comm->unfinished.empty()) return false;
    comm->region->member[comm->rank].finalized.store(1);
    for (int r = 0; r < comm->ranks; ++r)
      if (comm->region->member[r].finalized.load() == 0) return false;
    comm->phase = Phase::kFinalized;
    comm->state = ncclSuccess;
    g.changed.notify_all();
    return true;
  });
}

ncclResult_t wait_for_finalize(const Comm& comm) {
  wait_for([&] { return comm->phase != Phase::kFinalizing || comm->aborted(); });
  const std::scoped_lock lock(g.mutex);
  if (comm->phase == Phase::kFinalized) return ncclSuccess;
  const bool failed = comm->state != ncclSuccess && comm->state != ncclInProgress;
  return failed ? comm->state : fail(ncclInternalError, "finalize: aborted");
}

}  // namespace

ncclResult_t fail(ncclResult_t result, const std::string& text) {
  std::fprintf(stderr, "nccl_double: process %d: %s\n", getpid(), text.c_str());
  const std::scoped_lock lock(g.error_mutex);
  g.last_error = text;
  return result;
}

void set_error(ncclComm& comm, ncclResult_t state, const std::string& text) {
  comm.state = fail(state, text);
  comm.error = text;
  g.changed.notify_all();
}

void fail_communicator(ncclComm& comm, ncclResult_t state, const std::string& text) {
  if (comm.aborted()) return;  // what comes of an abort is no error, and the first error stays
  set_error(comm, state, text);
  comm.phase = Phase::kFailed;
  comm.over = true;
}

Comm ready(ncclComm_t handle, const char* call, ncclResult_t* result) {
  const std::scoped_lock lock(g.mutex);
  Comm comm = find(handle);
  const std::string name = std::string(call) + ": ";
  if (comm == nullptr) {
    *result = fail(ncclInvalidArgument, name + "no such communicator");
  } else if (comm->state == ncclInProgress) {
    *result = fail(ncclInvalidArgument, name + "the communicator's previous call is still in progress");
  } else if (comm->state != ncclSuccess) {
    *result = fail(comm->state, name + "the communicator has failed: " + comm->error);
  } else if (comm->phase == Phase::kFinalized || comm->aborted()) {
    *result = fail(ncclInvalidUsage, name + "the communicator is finalized or aborted");
  } else {
    *result = ncclSuccess;
    return comm;
  }
  return nullptr;
}

bool enter(ncclComm& comm, const char* call) {
  const void* nobody = nullptr;
  if (comm.user.compare_exchange_strong(nobody, &t_self) || nobody == &t_self) return true;
  fail(ncclInvalidUsage, std::string(call) + ": another thread is inside of a call on the same communicator");
  return false;
}

void leave(ncclComm& comm) { comm.user = nullptr; }

}  // namespace multicomm::tests::nccl

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return fail(ncclInvalidArgument, "ncclGetUniqueId: no place for the id");
  return create_region(id) ? ncclSuccess : fail(ncclSystemError, "ncclGetUniqueId: cannot make shared memory");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(comm, ranks, id, rank, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return init(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  ncclResult_t result;
  const Comm comm = ready(handle, "ncclCommFinalize", &result);
  if (comm == nullptr) return result;
  if (!enter(*comm, "ncclCommFinalize")) return ncclInvalidUsage;
  finalize_in_background(comm);
  result = comm->blocking ? wait_for_finalize(comm) : ncclInProgress;
  leave(*comm);
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Comm comm;
  bool finalize;
  {
    const std::scoped_lock lock(g.mutex);
    comm = find(handle);
    if (comm == nullptr) return fail(ncclInvalidArgument, "ncclCommDestroy: no such communicator");
    if (comm->state == ncclInProgress)
      return fail(ncclInvalidArgument, "ncclCommDestroy: the communicator's previous call is still in progress");
    finalize = comm->phase == Phase::kReady && comm->state == ncclSuccess;
  }
  if (!enter(*comm, "ncclCommDestroy")) return ncclInvalidUsage;
  if (finalize) {
    finalize_in_background(comm);
    wait_for_finalize(comm);
  }
  wait_for([&] { return comm->unfinished.empty(); });
  leave(*comm);
  forget(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Comm comm;
  {
    const std::scoped_lock lock(g.mutex);
    comm = find(handle);
    if (comm == nullptr) return fail(ncclInvalidArgument, "ncclCommAbort: no such communicator");
    comm->over = true;
    g.changed.notify_all();
  }
  return wait_at_group_end([comm] {
    wait_for([&] { return comm->unfinished.empty(); });
    forget(comm);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  const std::scoped_lock lock(g.mutex);
  const Comm comm = find(handle);
  if (comm == nullptr || state == nullptr) return fail(ncclInvalidArgument, "ncclCommGetAsyncError: bad argument");
  *state = comm->state;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static constexpr const char* kTexts[] = {"no error",
                                           "CUDA error",
                                           "system error",
                                           "internal error",
                                           "invalid argument",
                                           "invalid usage",
                                           "remote error: another process has failed or gone",
                                           "in progress"};
  return result >= 0 && result <= ncclInProgress ? kTexts[result] : "unknown result";
}

const char* ncclGetLastError(ncclComm_t handle) {
  thread_local std::string text;
  text.clear();
  {
    const std::scoped_lock lock(g.mutex, g.error_mutex);
    const Comm comm = find(handle);
    text = comm != nullptr && !comm->error.empty() ? comm->error : g.last_error;
  }
  return text.c_str();
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  ncclResult_t result;
  if (const Comm comm = ready(handle, "ncclCommCount", &result)) *count = comm->ranks;
  return result;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  ncclResult_t result;
  if (const Comm comm = ready(handle, "ncclCommUserRank", &result)) *rank = comm->rank;
  return result;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  ncclResult_t result;
  const Comm comm = ready(handle, "ncclRedOpCreatePreMulSum", &result);
  if (comm == nullptr) return result;
  if (op == nullptr || scalar == nullptr || !reducible(type) || residence != ncclScalarHostImmediate)
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: bad argument, or a scalar that is not the host's");
  const std::scoped_lock lock(g.mutex);
  auto& made = comm->made_ops[comm->next_op];
  made.first = type;
  std::memcpy(made.second.data(), scalar, size_of(type));
  *op = static_cast<ncclRedOp_t>(comm->next_op++);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  ncclResult_t result;
  const Comm comm = ready(handle, "ncclRedOpDestroy", &result);
  if (comm == nullptr) return result;
  const std::scoped_lock lock(g.mutex);
  return comm->made_ops.erase(op) != 0 ? ncclSuccess : fail(ncclInvalidArgument, "ncclRedOpDestroy: no such operation");
}
