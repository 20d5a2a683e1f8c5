// Groups and what is launched at their end; faults, the log and the counts.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl_double.h"
#include "nccl_reduce.h"

namespace multicomm::tests::nccl {
namespace {

constexpr size_t kLongestLog = 100000;
constexpr const char* kFaultNames[kFaults] = {"init", "launch", "async", "hang", "hanginit"};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first
  std::vector<Comm> entered;
  std::vector<Kernel> kernels;
  std::vector<std::function<ncclResult_t()>> waits;
};
thread_local Group t_group;

void set_faults(int64_t* faults, const char* text) {
  std::fill_n(faults, kFaults, 0);
  std::string rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const std::string one = rest.substr(0, rest.find(','));
    rest.erase(0, one.size() + 1);
    const size_t colon = one.find(':');
    const auto* name = std::find(kFaultNames, kFaultNames + kFaults, one.substr(0, colon));
    if (name == kFaultNames + kFaults || colon == std::string::npos)
      std::fprintf(stderr, "nccl_double: no such fault: %s\n", one.c_str()), std::abort();
    faults[name - kFaultNames] = std::atoll(one.c_str() + colon + 1);
  }
}

uint64_t lazy_every() {
  const char* value = std::getenv("NCCL_DOUBLE_LAZY");
  return value != nullptr ? std::strtoull(value, nullptr, 10) : 3;
}

// Takes the tickets and hands the kernels to their streams, at one go.
void launch(std::vector<Kernel>& kernels) {
  const std::scoped_lock lock(g.mutex);
  for (Kernel& kernel : kernels) {
    if (kernel.comm->aborted()) continue;
    kernel.ticket = ++g.kernels;
    kernel.hangs = strikes(kFailHang);
    kernel.fails = strikes(kFailAsync);
    g.calls += kernel.calls.size();
    g.unfinished.insert(kernel.ticket);
    kernel.comm->unfinished.insert(kernel.ticket);
    g.log.push_back(describe(kernel) + "\n");
    if (g.log.size() > kLongestLog) g.log.pop_front();
    DeviceStream* stream = kernel.stream;
    stream->enqueue(stream, run_kernel, new Kernel(kernel));
  }
}

// A moment later, by the service's thread; meanwhile the communicators are in progress.
void launch_later(std::vector<Kernel> kernels) {
  in_background([kernels = std::move(kernels), polls = 0]() mutable {
    if (++polls < 4) return false;
    launch(kernels);
    const std::scoped_lock lock(g.mutex);
    for (const Kernel& kernel : kernels)
      if (kernel.comm->state == ncclInProgress) kernel.comm->state = ncclSuccess;
    return true;
  });
}

ncclResult_t launch_group(Group& group) {
  if (group.kernels.empty()) return ncclSuccess;
  const bool blocking = group.kernels[0].comm->blocking;
  for (const Kernel& kernel : group.kernels)
    if (kernel.comm->blocking != blocking)
      return fail(ncclInvalidArgument, "ncclGroupEnd: blocking and nonblocking communicators in one group");
  // The same order in all processes.
  std::stable_sort(group.kernels.begin(), group.kernels.end(),
                   [](const Kernel& a, const Kernel& b) { return nonce_of(a.comm->id) < nonce_of(b.comm->id); });
  bool later = false;
  {
    const std::scoped_lock lock(g.mutex);
    if (strikes(kFailLaunch)) return fail(ncclSystemError, "ncclGroupEnd: injected: nothing is launched");
    const uint64_t every = blocking ? 0 : lazy_every();
    for (const Comm& comm : group.entered) later |= every != 0 && ++comm->groups % every == 0;
    if (later)
      for (const Kernel& kernel : group.kernels)
        if (kernel.comm->state == ncclSuccess) kernel.comm->state = ncclInProgress;
  }
  if (!later) return launch(group.kernels), ncclSuccess;
  launch_later(std::move(group.kernels));
  return ncclInProgress;
}

ncclResult_t end_group() {
  Group group = std::move(t_group);
  t_group = {};
  ncclResult_t result = group.error != ncclSuccess ? group.error : launch_group(group);
  for (const Comm& comm : group.entered) leave(*comm);
  for (const auto& wait : group.waits)
    if (const ncclResult_t waited = wait(); result == ncclSuccess) result = waited;
  return result;
}

// Why NCCL would refuse the call; null if it would not.
const char* objection(const ncclComm& comm, const Call& call, DeviceStream* stream) {
  if (stream == nullptr) return "no stream";
  if (call.type < 0 || call.type >= ncclNumTypes) return "no such type";
  if (call.root < 0 || call.root >= comm.ranks) return "no such root or peer";
  const bool at_root = call.root == comm.rank;
  const bool sends = call.kind == kScatter || call.kind == kBroadcast ? at_root : call.kind != kRecv;
  const bool receives = call.kind == kGather || call.kind == kReduce ? at_root : call.kind != kSend;
  if (call.count > 0 && ((sends && call.send == nullptr) || (receives && call.recv == nullptr))) return "no buffer";
  if (call.kind == kAllToAll && call.send == call.recv) return "not in place";
  if (call.kind == kAllReduce || call.kind == kReduce || call.kind == kReduceScatter) {
    if (!reducible(call.type)) return "this type is not reduced";
    if (call.op < 0) return "no such operation";
  }
  return nullptr;
}

ncclResult_t add(const char* name, Call call, ncclComm_t handle, DeviceStream* stream) {
  ncclResult_t result;
  const Comm comm = ready(handle, name, &result);
  if (comm == nullptr) return result;
  if (!enter(*comm, name)) return ncclInvalidUsage;
  Group& group = t_group;
  if (std::find(group.entered.begin(), group.entered.end(), comm) == group.entered.end()) group.entered.push_back(comm);
  const char* why = objection(*comm, call, stream);
  if (why != nullptr) return fail(ncclInvalidArgument, std::string(name) + ": " + why);
  if (call.op >= ncclNumOps) {
    const std::scoped_lock lock(g.mutex);
    const auto made = comm->made_ops.find(call.op);
    if (made == comm->made_ops.end() || made->second.first != call.type)
      return fail(ncclInvalidArgument, std::string(name) + ": no such operation on this type");
    call.op = ncclNumOps;
    call.scalar = made->second.second;
  }
  if (call.count == 0 && call.kind < kSend) return ncclSuccess;  // as NCCL: nothing is launched
  auto kernel = std::find_if(group.kernels.begin(), group.kernels.end(),
                             [&](const Kernel& k) { return k.comm == comm && k.stream == stream; });
  if (kernel == group.kernels.end()) {
    group.kernels.emplace_back();
    kernel = group.kernels.end() - 1;
    kernel->comm = comm;
    kernel->stream = stream;
  }
  kernel->calls.push_back(call);
  return ncclSuccess;
}

// Outside of a group a call is one.
ncclResult_t submit(const char* name, const Call& call, ncclComm_t handle, DeviceStream* stream) {
  ncclGroupStart();
  const ncclResult_t added = add(name, call, handle, stream);
  if (t_group.error == ncclSuccess) t_group.error = added;
  const ncclResult_t ended = ncclGroupEnd();
  return added != ncclSuccess ? added : ended;
}

}  // namespace

Global& g = *[] {
  auto* made = new Global;
  set_faults(made->faults, std::getenv("NCCL_DOUBLE_FAIL"));
  return made;
}();

bool strikes(Fault fault) { return g.faults[fault] != 0 && --g.faults[fault] == 0; }

ncclResult_t wait_at_group_end(std::function<ncclResult_t()> wait) {
  if (t_group.depth == 0) return wait();
  t_group.waits.push_back(std::move(wait));
  return ncclSuccess;
}

}  // namespace multicomm::tests::nccl

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return fail(ncclInvalidArgument, "ncclGetVersion: no place for the version");
  const char* value = std::getenv("NCCL_DOUBLE_VERSION");
  *version = value != nullptr ? std::atoi(value) : 22807;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++t_group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (t_group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: no group was started");
  return --t_group.depth > 0 ? ncclSuccess : end_group();
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclAllReduce", {kAllReduce, send, recv, count, type, op, 0}, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit("ncclBroadcast", {kBroadcast, send, recv, count, type, ncclSum, root}, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclReduce", {kReduce, send, recv, count, type, op, root}, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit("ncclAllGather", {kAllGather, send, recv, count, type, ncclSum, 0}, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclReduceScatter", {kReduceScatter, send, recv, count, type, op, 0}, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return submit("ncclAlltoAll", {kAllToAll, send, recv, count, type, ncclSum, 0}, comm, stream);
}

ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return submit("ncclGather", {kGather, send, recv, count, type, ncclSum, root}, comm, stream);
}

ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  return submit("ncclScatter", {kScatter, send, recv, count, type, ncclSum, root}, comm, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit("ncclSend", {kSend, send, nullptr, count, type, ncclSum, peer}, comm, stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclRecv", {kRecv, nullptr, recv, count, type, ncclSum, peer}, comm, stream);
}

void nccl_double_fail(const char* faults) {
  const std::scoped_lock lock(g.mutex);
  set_faults(g.faults, faults);
}

size_t nccl_double_log(char* out, size_t size) {
  const std::scoped_lock lock(g.mutex);
  std::string text;
  for (const std::string& line : g.log) text += line;
  if (size > 0) std::snprintf(out, size, "%s", text.c_str());
  return text.size();
}

void nccl_double_counts(uint64_t* kernels, uint64_t* calls, uint64_t* communicators) {
  const std::scoped_lock lock(g.mutex);
  if (kernels != nullptr) *kernels = g.kernels;
  if (calls != nullptr) *calls = g.calls;
  if (communicators != nullptr) *communicators = g.communicators.size();
}
