// A double of NCCL for processes of one machine without GPUs: NCCL's C interface, moving HOST memory between processes
// through shared memory, on streams of the simulated device (stream.h).
//
// It is stricter than NCCL where NCCL may go either way, so that a program that NCCL could hang hangs here: a
// collective ends nowhere before all members have begun it, a send not before its receive, and a device runs one kernel
// at a time in the order of launch. And it tells where NCCL would hang or corrupt: members compare what they call.
//
// What it cannot show: NCCL's own protocols, algorithms and bugs; real streams, events and their visibility of memory;
// whether a pointer is the device's; performance, topology and networks; what a real abort leaves on a device.
//
// Environment:
//   NCCL_DOUBLE_VERSION     what ncclGetVersion says; 22807
//   NCCL_DOUBLE_GPU         the GPU of the communicators made from now on; one of the process's own
//   NCCL_DOUBLE_CONCURRENT  1: kernels of different communicators do not wait for each other
//   NCCL_DOUBLE_LAZY        every n-th group of a nonblocking communicator is launched a moment later, and
//                           ncclInProgress meanwhile; 3, 0 for never
//   NCCL_DOUBLE_FAIL        "what:n,...", also by nccl_double_fail, which replaces all that was set and counts anew:
//     init      the n-th communicator of this process fails with ncclSystemError
//     hanginit  the n-th communicator is in progress until aborted
//     launch    the n-th group (or call outside of one) that has something to launch fails with ncclSystemError
//     hang      the n-th kernel ends only when aborted
//     async     when the n-th kernel begins, its communicator says ncclRemoteError, and neither it nor any later
//               kernel of the communicator ends unless aborted
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "nccl_region.h"

namespace multicomm::tests::nccl {

enum Kind : int32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv
};

struct Call {
  Kind kind;
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;  // of a made operation ncclNumOps, with its scalar below
  int root;        // or the peer
  std::array<char, 8> scalar{};

  Signature signature(uint64_t sequence) const;
};

enum class Phase { kMeeting, kReady, kFinalizing, kFinalized, kFailed };

struct ncclComm : std::enable_shared_from_this<ncclComm> {
  // Set before anyone else knows the communicator.
  int ranks = 0;
  int rank = 0;
  bool blocking = true;
  ncclUniqueId id{};
  std::string gpu;

  // Written by the meeting, read after it.
  std::shared_ptr<Region> region;

  // Under g.mutex.
  Phase phase = Phase::kMeeting;
  ncclResult_t state = ncclInProgress;
  std::string error;
  std::set<uint64_t> unfinished;  // tickets of its kernels
  uint64_t groups = 0;
  std::unordered_map<int, std::pair<ncclDataType_t, std::array<char, 8>>> made_ops;
  int next_op = ncclNumOps;

  std::atomic<bool> over = false;           // aborted, or failed by a mismatch: kernels end at once
  std::atomic<bool> stuck = false;          // by an injected fault: kernels never end, unless over
  std::atomic<const void*> user = nullptr;  // the thread inside of a call that launches
  bool aborted() const { return over.load(std::memory_order_relaxed); }

  // Of the one kernel that runs: kernels of a communicator follow each other.
  uint64_t steps = 0;
  uint64_t collectives = 0;
  uint64_t sent[kMostRanks] = {};
  uint64_t received[kMostRanks] = {};
};
using Comm = std::shared_ptr<ncclComm>;

// All calls of one group on one communicator and stream.
struct Kernel {
  Comm comm;
  DeviceStream* stream = nullptr;
  std::vector<Call> calls;
  uint64_t ticket = 0;
  bool hangs = false;  // injected faults: never ends; the communicator fails when it begins
  bool fails = false;
};

enum Fault { kFailInit, kFailLaunch, kFailAsync, kFailHang, kFailHangInit, kFaults };

// The one state of this process. Never destroyed, as streams may run on while the process ends.
struct Global {
  std::mutex mutex;
  std::condition_variable changed;  // anything below, or a communicator's members under the mutex

  // Under the mutex.
  std::unordered_map<const ncclComm*, Comm> communicators;
  std::set<uint64_t> unfinished;  // tickets of launched kernels: the device runs the first
  std::list<std::string> log;
  uint64_t kernels = 0;
  uint64_t calls = 0;
  int64_t faults[kFaults] = {};  // how many events are left until it strikes; 0: never

  std::mutex error_mutex;  // may be taken under the other
  std::string last_error;  // under it

  std::atomic<bool> exiting = false;
};
extern Global& g;

// nccl_service.cpp: one thread for what goes on behind nonblocking calls. `step` is called, without locks, until it
// returns true.
void in_background(std::function<bool()> step);

// nccl_kernel.cpp: what a stream runs. Deletes the kernel.
void run_kernel(void* kernel);
std::string describe(const Kernel& kernel);

// nccl_launch.cpp
bool strikes(Fault fault);  // counts one event; under g.mutex
// Inside of a group the wait happens at its end, else now.
ncclResult_t wait_at_group_end(std::function<ncclResult_t()> wait);

// nccl_comm.cpp
// Puts the text down for ncclGetLastError, prints it, and returns `result`.
ncclResult_t fail(ncclResult_t result, const std::string& text);
// What ncclCommGetAsyncError shall say; under g.mutex.
void set_error(ncclComm& comm, ncclResult_t state, const std::string& text);
// The same, and its kernels end at once.
void fail_communicator(ncclComm& comm, ncclResult_t state, const std::string& text);
// The communicator, if it is there, idle and without error; else null, with the reason in `result`.
Comm ready(ncclComm_t handle, const char* call, ncclResult_t* result);
// Of the threads, this one is inside of calls on the communicator until it leaves. False: another one is.
bool enter(ncclComm& comm, const char* call);
void leave(ncclComm& comm);

// Sleeps a little longer each time.
class Backoff {
 public:
  void pause();

 private:
  int times_ = 0;
};

}  // namespace multicomm::tests::nccl
