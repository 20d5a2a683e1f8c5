// The seam between the engine and what moves bytes. The engine knows these interfaces only; transport/mpi implements
// them over MPI, transport/sim for simulated ranks in one process.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "coordinator/batch.h"
#include "coordinator/record.h"

namespace multicomm {

// Told once, from inside Progress::poll(), that something started is over. `error` is null on success.
class Completion {
 public:
  virtual void complete(const std::string* error) = 0;
  // Device planes, before complete() and at most once: all of it is in the device's queue, so that whatever a stream is
  // made to wait for comes after it.
  virtual void launched() {}

 protected:
  ~Completion() = default;
};

// One rank's line in the table that explains a disagreement.
struct TableEntry {
  char text[256];
};

// One group's agreement channel. All calls by the driver. What is started is started in the same order on every member:
// round k, the timestamp and the table if round k's result asks for them, round k+1. A timestamp, but only one, may
// still be in flight when what follows it is started. Never by a local event: two collectives started in different
// orders on one communicator do not hang, they exchange their sums.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;
  // `mine` and `result` stay valid and untouched until completion.
  virtual void start_round(const Record& mine, Record& result, Completion& done) = 0;
  // All-gather of one entry per rank; `all` has room for the whole group.
  virtual void start_table(const TableEntry& mine, TableEntry* all, Completion& done) = 0;
  // All-reduce of one timestamp per rank: their maximum.
  virtual void start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) = 0;
};

// One group's way of moving tensors. All calls by the driver, none waits for a peer or for a buffer (two ranks could
// hold each other's). Batches come in agreed order.
class DataPlane {
 public:
  virtual ~DataPlane() = default;
  // `batch` stays valid until completion. Outputs of abandoned operations go to scratch.
  virtual void launch(Batch& batch, Completion& done) = 0;
  // A send or receive; matched by (peer, tag) in posting order.
  virtual void post(const OperationPtr& operation) = 0;
};

// Moves the tensors of a device that runs strictly in launch order and blocks in each batch until all members have
// come. All calls by the driver.
class DevicePlane {
 public:
  virtual ~DevicePlane() = default;
  // Before a group's first batch its members tell each other what they move it with, and before the first message of a
  // pair those two do. `peer`: the other one's group rank; -1 for all members. `first` says on which device.
  virtual void introduce(int peer, const Operation& first, TableEntry& mine) = 0;
  // What all members have said (of a pair: both, by group rank). Returns why they cannot work together, or nothing; all
  // members return the same.
  virtual std::string introduced(int peer, const std::vector<TableEntry>& all) = 0;
  virtual bool ready() const = 0;  // the members have been introduced
  // `batch` stays valid until completion. `more`: the next launch belongs to the same unit, which all members launch
  // alike. A send or receive is a batch of its own.
  virtual void launch(Batch& batch, bool more, Completion& done) = 0;
  // The group is given up: what is launched and not done ends with an error, so that the device gets on with other
  // groups.
  virtual void abort() = 0;
};

// Receives what a data plane has to say about point-to-point operations.
class PointToPointSink {
 public:
  // `error`, if any, says what went wrong; of which group and operation is for the receiver of this to add.
  virtual void point_to_point_done(const OperationPtr& operation, const ErrorPtr& error) = 0;
  // A message between devices has both its ends. Returns this rank's proposal for its place in the launch order;
  // `number` is the message's within the group, the same on both sides.
  virtual uint64_t message_matched(const OperationPtr& operation, uint64_t number) = 0;
  // The later of both proposals is known: from here on it is a batch of the device.
  virtual void message_ordered(OperationPtr operation, uint64_t timestamp) = 0;

 protected:
  ~PointToPointSink() = default;
};

// Everything that one group needs; freed by whoever made it, once all members have left.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual ControlPlane& control() = 0;
  virtual DataPlane& data() = 0;
  virtual DevicePlane* device() { return nullptr; }  // null: this group moves no device tensors
  // Null before the channel is freed: from then on it is no part of what is polled.
  virtual void set_sink(PointToPointSink* sink) = 0;
  // Whether nothing is in flight: no memory but its own is in the transport's hands.
  virtual bool idle() const = 0;
  virtual uint64_t identity() const = 0;  // of the group; the same on all its members, and no other group's
};

// Progress of all groups at once: one look at everything outstanding.
class Progress {
 public:
  virtual ~Progress() = default;
  // Reports what is over through its Completion; returns how many. Never blocks. Driver only.
  virtual size_t poll() = 0;
};

}  // namespace multicomm
