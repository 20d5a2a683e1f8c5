// What runs on a stream: the collectives of a kernel one after the other, then all its messages at once.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "nccl_double.h"
#include "nccl_reduce.h"

namespace multicomm::tests::nccl {
namespace {

constexpr const char* kNames[] = {"allreduce", "broadcast", "reduce",  "allgather", "reducescatter",
                                  "alltoall",  "gather",    "scatter", "send",      "recv"};
constexpr const char* kOps[] = {"sum", "prod", "max", "min", "avg", "premulsum"};

bool reduces(Kind kind) { return kind == kAllReduce || kind == kReduce || kind == kReduceScatter; }

// The kernel need not go on.
bool over(const ncclComm& comm) { return comm.aborted() || g.exiting.load(std::memory_order_relaxed); }

// False: over before the condition came true.
template <typename Condition>
bool await(const ncclComm& comm, Condition&& condition) {
  for (Backoff backoff; !condition(); backoff.pause())
    if (over(comm)) return false;
  return true;
}

void mismatch(ncclComm& comm, int mine, const Signature& my, int other, const Signature& their) {
  const std::scoped_lock lock(g.mutex);
  fail_communicator(comm, ncclInvalidUsage,
                    "mismatch: rank " + std::to_string(mine) + " calls " + my.text() + ", rank " +
                        std::to_string(other) + " calls " + their.text());
}

// In steps, each of which moves a chunk of every piece: whoever has something to give puts it on its stage, and takes
// from the others' stages when all have done so. There are two stages, in turns as the signatures are.
bool run_collective(ncclComm& comm, const Call& call) {
  Region& region = *comm.region;
  const size_t size = size_of(call.type);
  const int ranks = comm.ranks;
  const bool from_root = call.kind == kBroadcast || call.kind == kScatter;
  const bool to_root = call.kind == kReduce || call.kind == kGather;
  const bool pieces = call.kind == kReduceScatter || call.kind == kAllToAll || call.kind == kScatter;  // one per rank
  const bool gives = !from_root || comm.rank == call.root;
  const bool takes = !to_root || comm.rank == call.root;
  const Signature signature = call.signature(comm.collectives++);
  const size_t room = kStage / (pieces ? ranks : 1) / 64 * 64;  // bytes of a piece on a stage
  const auto* send = static_cast<const char*>(call.send);
  auto* recv = static_cast<char*>(call.recv);

  for (size_t from = 0; from < call.count; from += room / size) {
    const size_t count = std::min(room / size, call.count - from);
    const uint64_t step = comm.steps++;
    if (gives) {
      for (int piece = 0; piece < (pieces ? ranks : 1); ++piece) {
        const char* in = send + (piece * call.count + from) * size;
        char* out = region.member[comm.rank].stage[step % 2] + piece * room;
        if (reduces(call.kind) && call.op == ncclNumOps) scale(in, out, count, call.type, call.scalar.data());
        else std::memcpy(out, in, count * size);
      }
    }
    region.member[comm.rank].steps.post(step, signature);
    for (int r = 0; r < ranks; ++r) {
      if (!await(comm, [&] { return region.member[r].steps.has(step); })) return false;
      const Signature& theirs = region.member[r].steps.signature[step % 2];
      if (!(theirs == signature)) return mismatch(comm, comm.rank, signature, r, theirs), false;
    }
    if (!takes) continue;
    const char* stages[kMostRanks];
    for (int r = 0; r < ranks; ++r) stages[r] = region.member[r].stage[step % 2] + (pieces ? comm.rank * room : 0);
    if (reduces(call.kind)) {
      reduce(stages, ranks, recv + from * size, count, call.type, call.op);
    } else if (from_root) {
      std::memcpy(recv + from * size, stages[call.root], count * size);
    } else {
      for (int r = 0; r < ranks; ++r) std::memcpy(recv + (r * call.count + from) * size, stages[r], count * size);
    }
  }
  return true;
}

// One message, one end of it.
class Transfer {
 public:
  Transfer(ncclComm& comm, const Call& call)
      : comm_(comm),
        call_(call),
        sends_(call.kind == kSend),
        channel_(sends_ ? comm.region->channel[comm.rank][call.root] : comm.region->channel[call.root][comm.rank]),
        sequence_(sends_ ? comm.sent[call.root]++ : comm.received[call.root]++),
        bytes_(call.count * size_of(call.type)) {}

  // Messages of a pair follow each other: the key of those that must.
  int line() const { return call_.root * 2 + sends_; }
  bool done() const { return met_ && moved_ == bytes_; }

  // Whether anything happened; a mismatch ends the communicator.
  bool progress() {
    Posts& mine = sends_ ? channel_.sends : channel_.receives;
    const Posts& theirs = sends_ ? channel_.receives : channel_.sends;
    if (!posted_) {
      Signature signature = call_.signature(sequence_);
      signature.root = -1;  // each names the other
      mine.post(sequence_, signature);
      return posted_ = true;
    }
    if (!met_) {
      if (!theirs.has(sequence_)) return false;
      Signature expected = mine.signature[sequence_ % 2];
      expected.kind = sends_ ? kRecv : kSend;
      const Signature& got = theirs.signature[sequence_ % 2];
      if (!(expected == got)) mismatch(comm_, comm_.rank, mine.signature[sequence_ % 2], call_.root, got);
      return met_ = true;
    }
    return sends_ ? write() : read();
  }

 private:
  bool write() {
    const uint64_t at = channel_.written.load(std::memory_order_relaxed);
    const size_t room = kRing - (at - channel_.read.load(std::memory_order_acquire));
    const size_t bytes = std::min({room, bytes_ - moved_, kRing - at % kRing});
    std::memcpy(channel_.ring + at % kRing, static_cast<const char*>(call_.send) + moved_, bytes);
    channel_.written.store(at + bytes, std::memory_order_release);
    moved_ += bytes;
    return bytes > 0;
  }

  bool read() {
    const uint64_t at = channel_.read.load(std::memory_order_relaxed);
    const size_t there = channel_.written.load(std::memory_order_acquire) - at;
    const size_t bytes = std::min({there, bytes_ - moved_, kRing - at % kRing});
    std::memcpy(static_cast<char*>(call_.recv) + moved_, channel_.ring + at % kRing, bytes);
    channel_.read.store(at + bytes, std::memory_order_release);
    moved_ += bytes;
    return bytes > 0;
  }

  ncclComm& comm_;
  const Call& call_;
  const bool sends_;
  Channel& channel_;
  const uint64_t sequence_;
  const size_t bytes_;
  bool posted_ = false;
  bool met_ = false;
  size_t moved_ = 0;
};

void run_messages(ncclComm& comm, const std::vector<Call>& calls) {
  std::list<Transfer> transfers;
  for (const Call& call : calls)
    if (call.kind >= kSend) transfers.emplace_back(comm, call);
  for (Backoff backoff; !transfers.empty() && !over(comm);) {
    std::set<int> lines;
    bool moved = false;
    for (auto transfer = transfers.begin(); transfer != transfers.end();) {
      if (lines.insert(transfer->line()).second) moved |= transfer->progress();
      transfer = transfer->done() ? transfers.erase(transfer) : std::next(transfer);
    }
    if (moved) backoff = {};
    else backoff.pause();
  }
}

// Kernels of one communicator follow each other in any case; those of one device unless the environment says so.
bool first(const Kernel& kernel) {
  static const bool concurrent = [] {
    const char* value = std::getenv("NCCL_DOUBLE_CONCURRENT");
    return value != nullptr && std::string(value) == "1";
  }();
  return concurrent ? *kernel.comm->unfinished.begin() == kernel.ticket : *g.unfinished.begin() == kernel.ticket;
}

void work(Kernel& kernel) {
  ncclComm& comm = *kernel.comm;
  if (kernel.hangs || comm.stuck) await(comm, [] { return false; });
  for (const Call& call : kernel.calls)
    if (over(comm) || (call.kind < kSend && !run_collective(comm, call))) return;
  run_messages(comm, kernel.calls);
}

}  // namespace

std::string Signature::text() const {
  std::string result = std::string(kNames[kind]) + " " + name_of(static_cast<ncclDataType_t>(type));
  if (op >= 0) result += std::string(" ") + kOps[op];
  result += " " + std::to_string(count);
  if (root >= 0) result += " root " + std::to_string(root);
  return result + " (number " + std::to_string(sequence) + ")";
}

Signature Call::signature(uint64_t sequence) const {
  const bool rooted = kind == kBroadcast || kind == kReduce || kind == kGather || kind == kScatter;
  return {kind, type, reduces(kind) ? static_cast<int>(op) : -1, rooted ? root : -1, count, sequence};
}

std::string describe(const Kernel& kernel) {
  char hash[16];
  std::snprintf(hash, sizeof hash, "%08x", static_cast<unsigned>(nonce_of(kernel.comm->id)));
  std::string line = hash;
  for (size_t i = 0; i < kernel.calls.size(); ++i) {
    const Call& call = kernel.calls[i];
    line += std::string(i == 0 ? ": " : "; ") + kNames[call.kind] + " " + name_of(call.type) + " " +
            (reduces(call.kind) ? kOps[call.op] : "-") + " " + std::to_string(call.count);
    if (call.kind >= kSend) line += " peer " + std::to_string(call.root);
    else if (call.signature(0).root >= 0) line += " root " + std::to_string(call.root);
  }
  return line;
}

void run_kernel(void* argument) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  ncclComm& comm = *kernel->comm;
  {
    std::unique_lock lock(g.mutex);
    // An aborted kernel waits its turn, too: it leaves the device, which runs the kernels before it.
    g.changed.wait(lock, [&] { return g.exiting || first(*kernel); });
    if (kernel->fails) {
      comm.stuck = true;
      set_error(comm, ncclRemoteError, "injected: another process has gone");
    }
  }
  work(*kernel);
  const std::scoped_lock lock(g.mutex);
  g.unfinished.erase(kernel->ticket);
  comm.unfinished.erase(kernel->ticket);
  g.changed.notify_all();
}

void Backoff::pause() {
  ++times_;
  if (times_ < 64) sched_yield();
  else usleep(times_ < 256 ? 20 : 200);
}

}  // namespace multicomm::tests::nccl
