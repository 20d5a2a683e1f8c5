// Batches of a group whose members share a node, through shared memory.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport/poller.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace multicomm::shm {

// all_reduce, reduce and broadcast as a stream of chunks. Every chunk goes through three steps, each when the counters
// of all members allow it, so nobody waits inside:
//   publish  copy the own contribution into a slot
//   reduce   add up the own share of the chunk, in rank order, from everybody's slots; publish that share
//   consume  copy the other members' shares into the tensors
// Each byte is copied in once, added once and copied out once, in chunks that stay in the cache; tensors of a fused
// batch are packed by the copy itself. One rank computes each share, so all ranks get the same bits, in an order of
// additions that depends on nothing but the sizes. Half precision is added in fp32. Everything else goes to the plane
// behind.
class ShmDataPlane final : public DataPlane, public Poller {
 public:
  ShmDataPlane(std::unique_ptr<Segment> segment, int rank, int size, Pollers& pollers, DataPlane& other);
  void launch(Batch& batch, Completion& done) override;
  void post(const OperationPtr& operation) override { other_.post(operation); }
  size_t poll() override;
  bool idle() const { return chunks_.empty(); }
  void detach();  // from what is polled

 private:
  struct Task {
    Batch* batch;
    Completion* done;
    int64_t total;                 // elements of all operations
    std::vector<int64_t> offsets;  // of each operation in the concatenation
  };
  struct Chunk {
    std::shared_ptr<Task> task;
    int64_t begin;  // elements of the concatenation
    int64_t end;
    bool last;
  };
  struct Range {
    int64_t begin;
    int64_t end;
  };

  bool publish();
  bool reduce();
  bool consume();
  Range share(const Chunk& chunk, int member) const;
  std::byte* slot(uint64_t chunk, int member) {
    return segment_->part(static_cast<size_t>(member)).slots[chunk % kSlots];
  }
  bool all_reached(std::atomic<uint64_t> Part::* counter, uint64_t value);
  // Calls use(operation, element offset within it, element offset within `range`, count) for the pieces of a range.
  template <typename Use>
  static void for_pieces(const Task& task, Range range, Use use);
  void reduce_share(const Chunk& chunk, uint64_t number, Range range);

  const std::unique_ptr<Segment> segment_;
  const int rank_;
  const int size_;
  Pollers& pollers_;
  DataPlane& other_;
  std::deque<Chunk> chunks_;  // not yet consumed; the first is number consumed_
  uint64_t next_ = 0;         // number of the next chunk to be queued
  uint64_t published_ = 0;
  uint64_t reduced_ = 0;
  uint64_t consumed_ = 0;
  uint64_t slowest_consumed_ = 0;  // of all members, as last seen
  bool attached_ = false;
};

}  // namespace multicomm::shm
