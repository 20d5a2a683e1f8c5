// One collective or point-to-point call of one rank, from submission to completion.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/descriptor.h"
#include "coordinator/trace.h"

namespace multicomm {

// Contiguous elements of one tensor (or of the staging buffer that stands for it).
struct Segment {
  std::byte* data;
  int64_t count;  // elements
};

// Bytes of user memory that an operation reads or writes.
struct MemoryRange {
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

enum class ErrorKind : uint8_t {
  kUsage,    // ranks disagree, or a member has left: the group stays usable where it can
  kTimeout,  // nobody came in time: the group is given up
  kAborted,  // abort() or shutdown with work pending
  kBroken,   // the transport failed or an invariant of ours does not hold
};

struct OperationError {
  ErrorKind kind;
  std::string message;
  std::string cause{};  // what of it the other members are told; empty: all of it
};
using ErrorPtr = std::shared_ptr<const OperationError>;

// Written by the submitting thread up to submit(), then by the driver alone (whoever holds the drive lock) until it is
// done; `done()` publishes the result to every thread.
class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Operation() = default;

  // Readable form for error texts, such as "all_reduce(SUM) of float32 [3, 4]".
  virtual std::string describe() const = 0;
  // Driver: makes `inputs` and `outputs` readable and writable (stages what is not contiguous). Called once, after
  // every operation on overlapping memory is done. On a device its plane does so, in the order of the device's stream.
  virtual void prepare() {}
  // Driver: why it cannot be offered, although nothing is in the way of its memory any more. Asked before prepare();
  // must be the same on all members that have submitted it.
  virtual ErrorPtr hopeless() const { return nullptr; }
  // Driver, kGatherVariable: this member's piece, in elements or whatever else the operation counts in.
  virtual int64_t piece_size() const { return inputs.front().count; }
  // Driver, kGatherVariable: how much each member brings, once all have submitted. Makes room in `outputs`.
  virtual void set_piece_sizes(const std::vector<int64_t>&) {}
  // Driver: copies staged outputs back. Not called for a failed operation: no output is touched. On a device its plane
  // calls it.
  virtual void finish() {}
  // On a device: completes the futures that wait for the launch. On the completion thread, with no lock held, where
  // somebody waits for completion; else not at all.
  virtual void finalize_launch() {}
  // Completes futures, runs callbacks, lets go of the tensors. Runs once, on the completion thread or in a waiter, with
  // no lock held.
  virtual void finalize() {}
  // Driver, of a join: what takes this rank's place in an operation on devices that the others have agreed on; null: a
  // StandIn does.
  virtual std::shared_ptr<Operation> stand_in(const Descriptor&, int /*group_size*/) const { return nullptr; }

  Descriptor descriptor;
  // all_reduce: the tensor in both. broadcast, scatter: inputs on the root only; reduce, gather: outputs on the root
  // only. all_gather, gather: one output per rank; reduce_scatter, scatter: one input per rank; all_to_all: one of each
  // per rank.
  std::vector<Segment> inputs;
  std::vector<Segment> outputs;
  std::vector<MemoryRange> ranges;
  Clock::time_point submitted{};
  Clock::time_point deadline = Clock::time_point::max();
  bool own_deadline = false;  // else it follows the group's time-out
  // Within the group: of collectives, or of point-to-point operations. The driver moves what comes after a join.
  std::atomic<uint64_t> sequence{0};
  std::string name{};     // collectives: matched by it; empty: by the order of submission
  bool repeated = false;  // driver: another one of its name was still waiting when it came
  int contributors = 0;   // driver: members that bring something, where some have joined; 0: all

  bool timed = false;  // asks for finished()

  uint64_t ticket = 0;  // place among all submissions of the process

  int64_t joined_at = 0;  // of a join: ns by the clock that the hosts share

  // Point-to-point only, but for the result of a join: the last member to come.
  int peer = -1;  // group rank; -1 receives from any source
  int tag = 0;
  int64_t bytes() const;  // of a point-to-point message, or of what this rank brings to a collective

  // What an average divides by.
  int contributors_of(int group_size) const { return contributors > 0 ? contributors : group_size; }

  bool done() const { return done_.load(std::memory_order_acquire); }
  // On a device: it is in the device's queue, so that a stream can be made to wait for it.
  bool launched() const { return launched_.load(std::memory_order_acquire); }
  // Driver.
  void mark_launched() { launched_.store(true); }
  const ErrorPtr& error() const { return error_; }          // valid once done
  Clock::time_point finished() const { return finished_; }  // valid once done, where `timed`

  // True for the one caller that has to run finalize_launch().
  bool claim_finalize_launch() { return !launch_claimed_.exchange(true); }
  // True for the one caller that has to run finalize().
  bool claim_finalize() { return !finalize_claimed_.exchange(true); }
  bool finalize_claimed() const { return finalize_claimed_.load(); }
  // A future or hook waits for this operation: the completion thread is woken at once instead of when the engine rests.
  void want_completion() { completion_wanted_.store(true); }
  bool completion_wanted() const { return completion_wanted_.load(); }

  // --- owned by the driver ---
  Trail trail{};
  bool trail_waits = false;  // the trace was told that it waits
  bool prepared = false;
  // Given up by its caller while peers may still count on it: its input is used, its output goes to scratch.
  bool abandoned = false;
  // The transport reads and writes the caller's own memory, which nothing can call back.
  bool exposed = false;
  // All its segments lie in copies of its own (staged tensors): nothing of the caller's can be exposed.
  bool owns_buffers = false;
  // From here on `inputs` are a copy: what peers get is what was submitted, whatever the caller, who has his error,
  // does with his tensors.
  void copy_inputs();

  void mark_done(ErrorPtr error) {
    error_ = std::move(error);
    if (timed) finished_ = Clock::now();
    done_.store(true);  // sequentially consistent: paired with want_completion() then done() in the face
  }

 private:
  ErrorPtr error_;
  std::vector<std::byte> input_copy_;  // driver
  Clock::time_point finished_;
  std::atomic<bool> launched_{false};
  std::atomic<bool> done_{false};
  std::atomic<bool> launch_claimed_{false};
  std::atomic<bool> finalize_claimed_{false};
  std::atomic<bool> completion_wanted_{false};
};
using OperationPtr = std::shared_ptr<Operation>;

inline bool is_join(const OperationPtr& operation) { return operation->descriptor.kind == OpKind::kJoin; }

// Of a wait that may be for ever.
inline Operation::Clock::time_point after(Operation::Clock::time_point time, Operation::Clock::duration wait) {
  return Operation::Clock::time_point::max() - time < wait ? Operation::Clock::time_point::max() : time + wait;
}

inline int64_t Operation::bytes() const {
  int64_t elements = 0;
  for (const Segment& s : inputs.empty() ? outputs : inputs) elements += s.count;
  return elements * static_cast<int64_t>(size_of(descriptor.dtype));
}

inline void Operation::copy_inputs() {
  const size_t element = size_of(descriptor.dtype);
  for (const Segment& s : inputs)
    input_copy_.insert(input_copy_.end(), s.data, s.data + static_cast<size_t>(s.count) * element);
  std::byte* at = input_copy_.data();
  for (Segment& s : inputs) {
    s.data = at;
    at += static_cast<size_t>(s.count) * element;
  }
}

}  // namespace multicomm
