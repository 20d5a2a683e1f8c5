// One group's communicators and what runs on them.
#pragma once

#include "transport/mpi/buffer_pool.h"
#include "transport/mpi/control_plane.h"
#include "transport/mpi/data_plane.h"
#include "transport/mpi/messages.h"

namespace multicomm::mpi {

inline constexpr int64_t kLargestCount = int64_t{1} << 30;

// What all groups of a process share.
struct Shared {
  Requests requests;
  BufferPool pool;
  const Types* types = nullptr;  // made once MPI is up
};

// Owns two communicators with the same members: rounds and point-to-point on one, batches on the other, so that a batch in
// several steps never gets between two rounds.
class MpiChannel final : public Channel {
 public:
  MpiChannel(MPI_Comm control, MPI_Comm data, Shared& shared)
      : control_comm_(control),
        data_comm_(data),
        control_(control, shared.requests, *shared.types),
        messages_(control, shared.requests, kLargestCount),
        data_(data, shared.requests, *shared.types, shared.pool, messages_, kLargestCount) {}
  ControlPlane& control() override { return control_; }
  DataPlane& data() override { return data_; }
  void set_sink(PointToPointSink* sink) override { messages_.set_sink(sink); }
  // Collective over the members, once all of them have left.
  void free_communicators() {
    MPI_Comm_free(&data_comm_);
    MPI_Comm_free(&control_comm_);
  }

 private:
  MPI_Comm control_comm_;
  MPI_Comm data_comm_;
  MpiControlPlane control_;
  Messages messages_;
  MpiDataPlane data_;
};

}  // namespace multicomm::mpi
