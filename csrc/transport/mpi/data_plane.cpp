#include "transport/mpi/data_plane.h"

#include <algorithm>
#include <cstring>

#include "coordinator/reduce_kernels.h"
#include "coordinator/segments.h"

namespace multicomm::mpi {
namespace {

bool is_half(DType dtype) { return accumulation_type(dtype) != dtype; }

int as_int(int64_t count) { return static_cast<int>(count); }

}  // namespace

MpiDataPlane::MpiDataPlane(MPI_Comm communicator, Requests& requests, const Types& types, BufferPool& pool,
                           Messages& messages, int64_t largest_count)
    : communicator_(communicator),
      requests_(requests),
      types_(types),
      pool_(pool),
      messages_(messages),
      largest_count_(largest_count) {
  check(MPI_Comm_rank(communicator, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(communicator, &size_), "MPI_Comm_size");
}

// Calls call(offset, count) for pieces of at most largest_count_ elements; at least once, since a collective of nothing
// still has its place in the order.
template <typename Call>
void MpiDataPlane::in_chunks(int64_t count, Call call) const {
  int64_t offset = 0;
  do {
    const int64_t piece = std::min(count - offset, largest_count_);
    call(offset, as_int(piece));
    offset += piece;
  } while (offset < count);
}

void MpiDataPlane::launch(Batch& batch, Completion& done) {
  Task& task = tasks_.emplace_back();
  task.self = std::prev(tasks_.end());
  task.plane = this;
  task.batch = &batch;
  task.done = &done;
  // As long as it is not known to be packed: a start that fails leaves those before it in MPI's hands.
  for (const auto& operation : batch.operations) operation->exposed = !operation->abandoned && !operation->owns_buffers;
  switch (batch.descriptor().kind) {
    case OpKind::kAllReduce: all_reduce(task); break;
    case OpKind::kBroadcast: broadcast(task); break;
    case OpKind::kReduce: reduce(task); break;
    case OpKind::kAllGather:
    case OpKind::kGatherVariable: all_gather(task); break;
    case OpKind::kReduceScatter: reduce_scatter(task); break;
    case OpKind::kAllToAll:
    case OpKind::kGather:
    case OpKind::kScatter: exchange(task); break;
    case OpKind::kBarrier:  // rides in the record
    case OpKind::kJoin:
    case OpKind::kSend:
    case OpKind::kRecv: break;
  }
  // The request list must hold something whose completion ends the task; a batch without a request (all_to_all of
  // nothing) gets one that is complete at once, so that it ends in poll() like all others.
  if (task.remaining == 1) start(task, MPI_REQUEST_NULL);
  --task.remaining;
  for (const auto& operation : batch.operations)
    operation->exposed = !task.packed && !operation->abandoned && !operation->owns_buffers;
}

void MpiDataPlane::start(Task& task, MPI_Request request) {
  if (request == MPI_REQUEST_NULL) {
    check(MPI_Ibarrier(MPI_COMM_SELF, &request), "MPI_Ibarrier");
  }
  ++task.remaining;
  requests_.add(request, task);
}

void MpiDataPlane::Task::request_done(const MPI_Status&, const std::string* failure) {
  if (failure != nullptr && error.empty()) error = *failure;
  if (--remaining == 0) plane->release(*this);
}

void MpiDataPlane::release(Task& task) {
  if (task.error.empty() && task.unpack != nullptr) (this->*task.unpack)(task);
  pool_.give(std::move(task.staging));
  pool_.give(std::move(task.received));
  Completion* done = task.done;
  const std::string error = std::move(task.error);
  tasks_.erase(task.self);
  done->complete(error.empty() ? nullptr : &error);
}

void MpiDataPlane::average(const Operation& operation, std::byte* data, int64_t count) const {
  const Descriptor& d = operation.descriptor;
  if (d.reduce_op == ReduceOp::kAvg)
    finish_average(accumulation_type(d.dtype), data, count, operation.contributors_of(size_));
}

// Copies the inputs of all operations one behind the other, widened where they are reduced.
std::byte* MpiDataPlane::pack(Task& task) {
  const Descriptor& d = task.batch->descriptor();
  const bool reduces = is_reduction(d.kind);
  const size_t element = size_of(reduces ? accumulation_type(d.dtype) : d.dtype);
  int64_t total = 0;
  for (const auto& o : task.batch->operations) {
    // Receivers of a broadcast bring nothing but need the room.
    total += d.kind == OpKind::kBroadcast ? static_cast<int64_t>(o->descriptor.count) : total_count(o->inputs);
  }
  task.staging = pool_.take(static_cast<size_t>(total) * element);
  task.packed = true;
  std::byte* to = task.staging.data.get();
  for (const auto& o : task.batch->operations) {
    for (const Segment& s : o->inputs) {
      if (reduces) {
        widen(d.dtype, to, s.data, s.count);
      } else if (s.count > 0) {
        std::memcpy(to, s.data, static_cast<size_t>(s.count) * element);
      }
      to += static_cast<size_t>(s.count) * element;
    }
  }
  return task.staging.data.get();
}

void MpiDataPlane::unpack_staged(Task& task) {
  const Descriptor& d = task.batch->descriptor();
  const bool reduces = is_reduction(d.kind);
  const size_t element = size_of(reduces ? accumulation_type(d.dtype) : d.dtype);
  std::byte* from = (task.received ? task.received : task.staging).data.get();
  for (const auto& o : task.batch->operations) {
    const int64_t count =
        d.kind == OpKind::kAllGather || d.kind == OpKind::kGatherVariable || d.kind == OpKind::kReduceScatter
            ? total_count(o->outputs)
            : static_cast<int64_t>(o->descriptor.count);
    if (!o->abandoned && !o->outputs.empty()) {
      if (reduces) average(*o, from, count);
      std::byte* at = from;
      for (const Segment& s : o->outputs) {
        if (reduces) {
          narrow(d.dtype, s.data, at, s.count);
        } else if (s.count > 0) {
          std::memcpy(s.data, at, static_cast<size_t>(s.count) * element);
        }
        at += static_cast<size_t>(s.count) * element;
      }
    }
    from += static_cast<size_t>(count) * element;
  }
}

// Where the batch's data lies in one piece: `own`, the only operation's tensor, where that may be worked on, else
// packed.
MpiDataPlane::Buffer MpiDataPlane::in_one_piece(Task& task, std::byte* own) {
  if (own != nullptr) return {own, static_cast<int64_t>(task.batch->descriptor().count)};
  Buffer buffer{pack(task), 0};
  for (const auto& o : task.batch->operations) buffer.count += static_cast<int64_t>(o->descriptor.count);
  task.unpack = &MpiDataPlane::unpack_staged;
  return buffer;
}

void MpiDataPlane::all_reduce(Task& task) {
  const Operation& first = *task.batch->operations.front();
  const Descriptor& d = first.descriptor;
  const DType type = accumulation_type(d.dtype);
  const bool direct = !task.batch->fused() && !is_half(d.dtype) && !first.abandoned &&
                      first.inputs.front().data == first.outputs.front().data;
  if (direct && d.reduce_op == ReduceOp::kAvg) task.unpack = &MpiDataPlane::average_outputs;
  const Buffer buffer = in_one_piece(task, direct ? first.outputs.front().data : nullptr);
  in_chunks(buffer.count, [&](int64_t offset, int piece) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Iallreduce(MPI_IN_PLACE, buffer.data + static_cast<size_t>(offset) * size_of(type), piece,
                         types_.reducible(d.dtype), types_.reduction(d.dtype, d.reduce_op), communicator_, &request),
          "MPI_Iallreduce");
    start(task, request);
  });
}

// The result lies in the outputs already; only the average is missing.
void MpiDataPlane::average_outputs(Task& task) {
  const Operation& operation = *task.batch->operations.front();
  if (operation.abandoned) return;
  for (const Segment& s : operation.outputs) average(operation, s.data, s.count);
}

void MpiDataPlane::broadcast(Task& task) {
  const Operation& first = *task.batch->operations.front();
  const Descriptor& d = first.descriptor;
  const bool direct = !task.batch->fused() && !first.abandoned;
  const auto& own = first.inputs.empty() ? first.outputs : first.inputs;
  const Buffer buffer = in_one_piece(task, direct ? own.front().data : nullptr);
  in_chunks(buffer.count, [&](int64_t offset, int piece) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ibcast(buffer.data + static_cast<size_t>(offset) * size_of(d.dtype), piece, types_.movable(d.dtype),
                     d.root, communicator_, &request),
          "MPI_Ibcast");
    start(task, request);
  });
}

void MpiDataPlane::reduce(Task& task) {
  const Operation& first = *task.batch->operations.front();
  const Descriptor& d = first.descriptor;
  const DType type = accumulation_type(d.dtype);
  const bool root = d.root == rank_;
  const bool direct = !task.batch->fused() && !is_half(d.dtype) &&
                      (!root || (!first.abandoned && first.inputs.front().data == first.outputs.front().data));
  if (direct && root && d.reduce_op == ReduceOp::kAvg) task.unpack = &MpiDataPlane::average_outputs;
  const Buffer buffer = in_one_piece(task, direct ? first.inputs.front().data : nullptr);
  in_chunks(buffer.count, [&](int64_t offset, int piece) {
    std::byte* at = buffer.data + static_cast<size_t>(offset) * size_of(type);
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ireduce(root ? MPI_IN_PLACE : at, root ? at : nullptr, piece, types_.reducible(d.dtype),
                      types_.reduction(d.dtype, d.reduce_op), d.root, communicator_, &request),
          "MPI_Ireduce");
    start(task, request);
  });
}

void MpiDataPlane::all_gather(Task& task) {
  const Operation& operation = *task.batch->operations.front();
  const Descriptor& d = operation.descriptor;
  const size_t element = size_of(d.dtype);
  const auto& outputs = operation.outputs;
  const Segment& input = operation.inputs.front();
  const int64_t total = total_count(outputs);
  const auto mine = static_cast<size_t>(rank_);

  // Decided by what all ranks know alike: the sizes, not whether this rank's outputs happen to be adjacent.
  if (!equal_counts(outputs) || total > largest_count_) {
    // One broadcast per rank, straight into the outputs.
    if (operation.abandoned) task.received = pool_.take(static_cast<size_t>(total) * element);
    std::byte* scratch = task.received.data.get();
    for (size_t r = 0; r < outputs.size(); ++r) {
      std::byte* at = operation.abandoned ? scratch : outputs[r].data;
      if (r == mine && at != input.data && input.count > 0)
        std::memcpy(at, input.data, static_cast<size_t>(input.count) * element);
      in_chunks(outputs[r].count, [&](int64_t offset, int piece) {
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Ibcast(at + static_cast<size_t>(offset) * element, piece, types_.movable(d.dtype),
                         static_cast<int>(r), communicator_, &request),
              "MPI_Ibcast");
        start(task, request);
      });
      if (scratch != nullptr) scratch += static_cast<size_t>(outputs[r].count) * element;
    }
    return;
  }
  std::byte* out = outputs.front().data;
  if (!adjacent(outputs, element) || operation.abandoned) {
    task.received = pool_.take(static_cast<size_t>(total) * element);
    out = task.received.data.get();
    task.unpack = &MpiDataPlane::unpack_staged;
  }
  const bool in_place = input.data == out + mine * static_cast<size_t>(input.count) * element;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallgather(in_place ? MPI_IN_PLACE : input.data, as_int(input.count), types_.movable(d.dtype), out,
                       as_int(input.count), types_.movable(d.dtype), communicator_, &request),
        "MPI_Iallgather");
  start(task, request);
}

void MpiDataPlane::reduce_scatter(Task& task) {
  const Operation& operation = *task.batch->operations.front();
  const Descriptor& d = operation.descriptor;
  const DType type = accumulation_type(d.dtype);
  const size_t element = size_of(type);
  const int64_t total = total_count(operation.inputs);
  const int64_t own = operation.outputs.front().count;
  // Packed, so that neither a list nor an output inside the input needs care; the result comes back the same way.
  std::byte* data = first_of(operation.inputs);
  if (is_half(d.dtype) || !adjacent(operation.inputs, element)) data = pack(task);
  task.received = pool_.take(static_cast<size_t>(own) * element);
  task.unpack = &MpiDataPlane::unpack_staged;
  MPI_Request request = MPI_REQUEST_NULL;
  if (total > largest_count_) {
    for (size_t r = 0; r < operation.inputs.size(); ++r) {
      const int64_t count = operation.inputs[r].count;
      in_chunks(count, [&](int64_t offset, int piece) {
        const size_t at = static_cast<size_t>(offset) * element;
        check(MPI_Ireduce(data + at, task.received.data.get() + at, piece, types_.reducible(d.dtype),
                          types_.reduction(d.dtype, d.reduce_op), static_cast<int>(r), communicator_, &request),
              "MPI_Ireduce");
        start(task, request);
      });
      data += static_cast<size_t>(count) * element;
    }
    return;
  }
  for (const Segment& s : operation.inputs) task.counts.push_back(as_int(s.count));
  if (equal_counts(operation.inputs)) {
    check(MPI_Ireduce_scatter_block(data, task.received.data.get(), as_int(own), types_.reducible(d.dtype),
                                    types_.reduction(d.dtype, d.reduce_op), communicator_, &request),
          "MPI_Ireduce_scatter_block");
  } else {
    check(MPI_Ireduce_scatter(data, task.received.data.get(), task.counts.data(), types_.reducible(d.dtype),
                              types_.reduction(d.dtype, d.reduce_op), communicator_, &request),
          "MPI_Ireduce_scatter");
  }
  start(task, request);
}

// Messages between one pair are matched in the order in which batches are launched, which is the same on both sides.
void MpiDataPlane::transfer(Task& task, const Segment& segment, int peer, bool send) {
  if (segment.count == 0) return;
  const DType dtype = task.batch->descriptor().dtype;
  const MPI_Datatype type = types_.movable(dtype);
  in_chunks(segment.count, [&](int64_t offset, int piece) {
    std::byte* at = segment.data + static_cast<size_t>(offset) * size_of(dtype);
    MPI_Request request = MPI_REQUEST_NULL;
    if (send) check(MPI_Isend(at, piece, type, peer, 0, communicator_, &request), "MPI_Isend");
    else check(MPI_Irecv(at, piece, type, peer, 0, communicator_, &request), "MPI_Irecv");
    start(task, request);
  });
}

void MpiDataPlane::send_to(Task& task, const Segment& from, int peer) { transfer(task, from, peer, true); }
void MpiDataPlane::receive_from(Task& task, const Segment& to, int peer) { transfer(task, to, peer, false); }

void MpiDataPlane::exchange(Task& task) {
  const Operation& operation = *task.batch->operations.front();
  const Descriptor& d = operation.descriptor;
  const size_t element = size_of(d.dtype);
  std::vector<Segment> outputs = operation.outputs;
  const auto mine = static_cast<size_t>(rank_);
  // all_to_all_single(x, x): what arrives must not overwrite what has not been sent.
  const bool staged =
      operation.abandoned || (d.kind == OpKind::kAllToAll && overlap(outputs, operation.inputs, element));
  if (staged && !outputs.empty()) {
    task.received = pool_.take(static_cast<size_t>(total_count(outputs)) * element);
    place(outputs, task.received.data.get(), element);
    task.unpack = &MpiDataPlane::unpack_exchange;
  }
  const auto copy = [&](const Segment& from, const Segment& to) {
    if (to.count > 0 && from.data != to.data) std::memcpy(to.data, from.data, static_cast<size_t>(to.count) * element);
  };
  if (d.kind == OpKind::kAllToAll) {
    for (int step = 0; step < size_; ++step) {  // start with different peers on each rank
      const int from = (rank_ + size_ - step) % size_, to = (rank_ + step) % size_;
      if (step == 0) {
        copy(operation.inputs[mine], outputs[mine]);
        continue;
      }
      receive_from(task, outputs[static_cast<size_t>(from)], from);
      send_to(task, operation.inputs[static_cast<size_t>(to)], to);
    }
  } else if (d.kind == OpKind::kGather) {
    if (rank_ != d.root) return send_to(task, operation.inputs.front(), d.root);
    copy(operation.inputs.front(), outputs[mine]);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) receive_from(task, outputs[static_cast<size_t>(r)], r);
  } else {
    if (rank_ != d.root) return receive_from(task, outputs.front(), d.root);
    copy(operation.inputs[mine], outputs.front());
    for (int r = 0; r < size_; ++r)
      if (r != rank_) send_to(task, operation.inputs[static_cast<size_t>(r)], r);
  }
}

void MpiDataPlane::unpack_exchange(Task& task) {
  const Operation& operation = *task.batch->operations.front();
  if (operation.abandoned) return;
  const std::byte* from = task.received.data.get();
  for (const Segment& s : operation.outputs) {
    const size_t bytes = static_cast<size_t>(s.count) * size_of(operation.descriptor.dtype);
    if (bytes > 0) std::memcpy(s.data, from, bytes);
    from += bytes;
  }
}

}  // namespace multicomm::mpi
