// One group's communicators and what runs on them.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "transport/mpi/buffer_pool.h"
#include "transport/mpi/control_plane.h"
#include "transport/mpi/data_plane.h"
#include "transport/mpi/messages.h"
#include "transport/poller.h"
#include "transport/shm/shm_data_plane.h"

namespace multicomm::mpi {

struct Shared;

// One group's device plane beside its communicators.
class GroupDevice : public DevicePlane {
 public:
  virtual void connect(Messages& messages) = 0;  // before anything else
  virtual bool idle() const = 0;
  virtual void close() = 0;  // collective over the members, once all of them have left
};
struct GroupDeviceParts {
  Shared* shared;
  MPI_Comm staging;  // the device plane's own; null where not all members had a device when the group was made
  int rank, size;
  std::vector<int> global_ranks;
  int64_t largest_count;
  uint64_t host;  // hash of this host's identity
};

// What all groups of a process share.
struct Shared final : Progress {
  size_t poll() override { return requests.poll() + pollers.poll(); }
  Requests requests;
  Pollers pollers;
  BufferPool pool;
  const Types* types = nullptr;  // made once MPI is up
  // Set before the first group is made.
  std::function<std::unique_ptr<GroupDevice>(const GroupDeviceParts&)> make_device;
  std::function<bool()> has_device;  // whether this process could use one
};

// Owns two communicators with the same members: rounds and point-to-point on one, batches on the other, so that a batch
// in several steps never gets between two rounds.
class MpiChannel final : public Channel {
 public:
  // `segment`: memory that all members share, where they are on one node.
  // `largest_count`: of elements in one MPI call.
  // `device`: or null.
  MpiChannel(MPI_Comm control, MPI_Comm data, Shared& shared, std::unique_ptr<shm::Segment> segment,
             std::unique_ptr<GroupDevice> device, int64_t largest_count, uint64_t identity)
      : identity_(identity),
        control_comm_(control),
        data_comm_(data),
        control_(control, shared.requests, *shared.types),
        device_(std::move(device)),
        messages_(control, shared.requests, largest_count, device_.get()),
        data_(data, shared.requests, *shared.types, shared.pool, messages_, largest_count) {
    if (device_) device_->connect(messages_);
    if (!segment) return;
    int rank = 0, size = 1;
    check(MPI_Comm_rank(control, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(control, &size), "MPI_Comm_size");
    shm_ = std::make_unique<shm::ShmDataPlane>(std::move(segment), rank, size, shared.pollers, data_);
  }
  ControlPlane& control() override { return control_; }
  DataPlane& data() override { return shm_ ? static_cast<DataPlane&>(*shm_) : data_; }
  DevicePlane* device() override { return device_.get(); }
  uint64_t identity() const override { return identity_; }
  void set_sink(PointToPointSink* sink) override {
    messages_.set_sink(sink);
    if (sink == nullptr && shm_) shm_->detach();
  }
  bool idle() const override {
    return messages_.idle() && data_.idle() && (!shm_ || shm_->idle()) && (!device_ || device_->idle());
  }
  // Collective over the members, once all of them have left.
  void free_communicators() {
    if (device_) device_->close();
    MPI_Comm_free(&data_comm_);
    MPI_Comm_free(&control_comm_);
  }

 private:
  const uint64_t identity_;
  MPI_Comm control_comm_;
  MPI_Comm data_comm_;
  MpiControlPlane control_;
  std::unique_ptr<GroupDevice> device_;
  Messages messages_;
  MpiDataPlane data_;
  std::unique_ptr<shm::ShmDataPlane> shm_;
};

}  // namespace multicomm::mpi
