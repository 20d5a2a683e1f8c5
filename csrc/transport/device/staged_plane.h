// Moves the tensors of a device through pinned host memory and the CPU plane: where NCCL cannot.
#pragma once

#include <mpi.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/device/launcher.h"
#include "transport/mpi/data_plane.h"

namespace multicomm::device {

// Copies of a batch's tensors come to the host chunk by chunk, each chunk goes its way as soon as it is there, and its
// result goes back while later ones are on their way. Where MPI says that it takes device memory, what it only moves
// stays there. Chunks reach the communicator in the order of the device's
// stream, which is the agreed one: a communicator of its own, since a local event starts them.
class StagedPlane {
 public:
  // `communicator`: null where the members have none; messages then still go.
  StagedPlane(MPI_Comm communicator, mpi::Requests& requests, const mpi::Types& types, BufferPool& pool,
              mpi::Messages& messages, int64_t largest_count, int size, int64_t chunk_bytes);
  bool has_communicator() const { return plane_ != nullptr; }
  // On all members alike.
  void set_takes_device_memory(bool takes) { takes_device_memory_ = takes; }
  void launch(Launcher& launcher, Batch& batch, Completion& done);  // driver
  // What comes back from now on stays out of the tensors.
  void abort() { aborted_.store(true); }
  bool idle() const { return flights_ == 0; }

 private:
  class HostOperation;
  struct Flight;
  struct Chunk;
  using FlightPtr = std::shared_ptr<Flight>;

  // The launcher's.
  void stage_out(const FlightPtr& flight);
  static std::shared_ptr<HostOperation> part_of(Chunk& chunk, const OperationPtr& operation);
  void lay_out_on_host(const FlightPtr& flight, const OperationPtr& operation, int64_t chunk_count);
  bool may_move_on_device(const Batch& batch) const;
  void lay_out_on_device(const FlightPtr& flight, const OperationPtr& operation);
  void stage_in(const FlightPtr& flight, size_t chunk);
  void chunk_over(const FlightPtr& flight, const std::string& error);
  // The driver's.
  void start(const FlightPtr& flight, size_t chunk);
  void chunk_done(const FlightPtr& flight, size_t chunk, const std::string* error);
  void end(const FlightPtr& flight, const std::string* error);

  const std::unique_ptr<mpi::MpiDataPlane> plane_;
  mpi::Messages& messages_;
  const int size_;
  const int64_t largest_count_;
  const int64_t chunk_bytes_;
  bool takes_device_memory_ = false;  // set before the first launch
  int flights_ = 0;                   // driver
  std::atomic<bool> aborted_{false};
};

// Whether this process's MPI says that it reads and writes device memory.
bool mpi_takes_device_memory();

// Makes the communication stream wait for what the batch's callers had enqueued before, and the operations' segments
// usable on it. The launcher's.
void begin(Launcher& launcher, const Batch& batch);
// Copies staged results back and marks the place in the stream after which everything is there.
std::shared_ptr<c10::Event> finish(Launcher& launcher, const Batch& batch);

// Runs `then` when the stream has passed the event, or, without one, all that it has been given. The launcher's.
void after_the_stream(Launcher& launcher, std::shared_ptr<c10::Event> event,
                      std::function<void(const std::string* error)> then);

}  // namespace multicomm::device
