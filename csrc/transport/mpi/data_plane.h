// Batches over one group's data communicator.
#pragma once

#include <list>
#include <vector>

#include "transport/mpi/buffer_pool.h"
#include "transport/mpi/messages.h"
#include "transport/mpi/mpi_types.h"
#include "transport/mpi/requests.h"

namespace multicomm::mpi {

class MpiDataPlane final : public DataPlane {
 public:
  // `largest_count`: elements per MPI call (MPI counts are int); larger transfers are cut into several.
  MpiDataPlane(MPI_Comm communicator, Requests& requests, const Types& types, BufferPool& pool, Messages& messages,
               int64_t largest_count);
  bool idle() const { return tasks_.empty(); }
  void launch(Batch& batch, Completion& done) override;
  void post(const OperationPtr& operation) override { messages_.post(operation); }

 private:
  // One batch in flight: counts its requests down, then unpacks.
  struct Task final : RequestHandler {
    MpiDataPlane* plane = nullptr;
    Batch* batch = nullptr;
    Completion* done = nullptr;
    int remaining = 1;  // one held by launch() itself, so that an early completion cannot end the task
    std::string error;
    bool packed = false;         // MPI sees `staging` alone, never the callers' memory
    BufferPool::Block staging;   // packed inputs, and outputs where the collective is in place
    BufferPool::Block received;  // outputs that are unpacked afterwards
    void (MpiDataPlane::*unpack)(Task&) = nullptr;
    std::vector<int> counts;  // must outlive the request
    std::list<Task>::iterator self;
    void request_done(const MPI_Status& status, const std::string* error) override;
  };

  void start(Task& task, MPI_Request request);
  void release(Task& task);
  void all_reduce(Task& task);
  void broadcast(Task& task);
  void reduce(Task& task);
  void all_gather(Task& task);
  void reduce_scatter(Task& task);
  void exchange(Task& task);  // all_to_all, gather, scatter: one message per pair
  void transfer(Task& task, const Segment& segment, int peer, bool send);
  void send_to(Task& task, const Segment& from, int peer);
  void receive_from(Task& task, const Segment& to, int peer);

  struct Buffer {
    std::byte* data;
    int64_t count;
  };
  Buffer in_one_piece(Task& task, std::byte* own);
  std::byte* pack(Task& task);
  void unpack_staged(Task& task);
  void average_outputs(Task& task);
  void unpack_exchange(Task& task);
  void average(const Operation& operation, std::byte* data, int64_t count) const;
  template <typename Call>
  void in_chunks(int64_t count, Call call) const;

  MPI_Comm communicator_;
  Requests& requests_;
  const Types& types_;
  BufferPool& pool_;
  Messages& messages_;
  const int64_t largest_count_;
  int rank_ = 0;
  int size_ = 1;
  std::list<Task> tasks_;
};

}  // namespace multicomm::mpi
