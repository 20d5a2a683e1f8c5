#include "transport/shm/shm_data_plane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "coordinator/reduce_kernels.h"

namespace multicomm::shm {
namespace {

constexpr int64_t kBlock = 2048;         // elements of half precision widened at a time
constexpr int64_t kShareAlignment = 64;  // bytes: two ranks never write one cache line

bool served(OpKind kind) { return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast; }

const std::byte* input_of(const Operation& operation) {
  return operation.inputs.empty() ? nullptr : operation.inputs.front().data;
}

std::byte* output_of(const Operation& operation) {
  // A caller that gave up gets nothing written, not even for the rest of a batch under way.
  return operation.abandoned || operation.outputs.empty() ? nullptr : operation.outputs.front().data;
}

}  // namespace

ShmDataPlane::ShmDataPlane(std::unique_ptr<Segment> segment, int rank, int size, Pollers& pollers, DataPlane& other)
    : segment_(std::move(segment)), rank_(rank), size_(size), pollers_(pollers), other_(other) {}

void ShmDataPlane::detach() {
  if (std::exchange(attached_, false)) pollers_.detach(*this);
}

void ShmDataPlane::launch(Batch& batch, Completion& done) {
  const Descriptor& d = batch.descriptor();
  if (!served(d.kind)) return other_.launch(batch, done);
  auto task = std::make_shared<Task>(Task{&batch, &done, 0, {}});
  for (const OperationPtr& operation : batch.operations) {
    task->offsets.push_back(task->total);
    task->total += static_cast<int64_t>(operation->descriptor.count);
  }
  const auto per_chunk = static_cast<int64_t>(kSlotBytes / size_of(d.dtype));
  int64_t begin = 0;
  do {  // a batch of nothing is one empty chunk, so that it ends in poll() like all others
    const int64_t end = std::min(begin + per_chunk, task->total);
    chunks_.push_back({task, begin, end, end == task->total});
    begin = end;
    ++next_;
  } while (begin < task->total);
  if (!attached_) pollers_.attach(*this);
  attached_ = true;
}

size_t ShmDataPlane::poll() {
  // One chunk of each step per look: the driver holds the drive lock meanwhile.
  const size_t steps = static_cast<size_t>(publish()) + static_cast<size_t>(reduce()) + static_cast<size_t>(consume());
  if (chunks_.empty()) detach();
  return steps;
}

bool ShmDataPlane::all_reached(std::atomic<uint64_t> Part::* counter, uint64_t value) {
  for (int member = 0; member < size_; ++member) {
    if ((segment_->part(static_cast<size_t>(member)).*counter).load(std::memory_order_acquire) < value) return false;
  }
  return true;
}

template <typename Use>
void ShmDataPlane::for_pieces(const Task& task, Range range, Use use) {
  auto at = static_cast<size_t>(std::upper_bound(task.offsets.begin(), task.offsets.end(), range.begin) -
                                task.offsets.begin()) -
            1;
  for (int64_t position = range.begin; position < range.end; ++at) {
    const int64_t end = at + 1 < task.offsets.size() ? task.offsets[at + 1] : task.total;
    const int64_t count = std::min(end, range.end) - position;
    if (count > 0) use(*task.batch->operations[at], position - task.offsets[at], position - range.begin, count);
    position += std::max<int64_t>(count, 0);
  }
}

// The elements of a chunk that `member` adds up. A broadcast is wholly its root's.
ShmDataPlane::Range ShmDataPlane::share(const Chunk& chunk, int member) const {
  const Descriptor& d = chunk.task->batch->descriptor();
  if (d.kind == OpKind::kBroadcast)
    return member == d.root ? Range{chunk.begin, chunk.end} : Range{chunk.end, chunk.end};
  const int64_t align = std::max<int64_t>(1, kShareAlignment / static_cast<int64_t>(size_of(d.dtype)));
  const int64_t count = chunk.end - chunk.begin;
  const int64_t piece = ((count + size_ - 1) / size_ + align - 1) / align * align;
  return {chunk.begin + std::min(count, piece * member), chunk.begin + std::min(count, piece * (member + 1))};
}

bool ShmDataPlane::publish() {
  if (published_ == next_) return false;
  if (published_ - slowest_consumed_ >= kSlots) {
    if (!all_reached(&Part::consumed, published_ - kSlots + 1)) return false;
    slowest_consumed_ = published_ - kSlots + 1;
  }
  const Chunk& chunk = chunks_[published_ - consumed_];
  const Descriptor& d = chunk.task->batch->descriptor();
  const size_t element = size_of(d.dtype);
  std::byte* to = slot(published_, rank_);
  const auto copy = [&](Range range) {
    std::byte* base = to + static_cast<size_t>(range.begin - chunk.begin) * element;
    for_pieces(*chunk.task, range, [&](const Operation& o, int64_t from, int64_t at, int64_t count) {
      const std::byte* input = input_of(o);
      if (input == nullptr) return;
      std::memcpy(base + static_cast<size_t>(at) * element, input + static_cast<size_t>(from) * element,
                  static_cast<size_t>(count) * element);
    });
  };
  if (d.kind == OpKind::kBroadcast) {
    if (rank_ == d.root) copy({chunk.begin, chunk.end});
  } else {
    // The own share is read from the tensor itself.
    const Range own = share(chunk, rank_);
    copy({chunk.begin, own.begin});
    copy({own.end, chunk.end});
  }
  segment_->part(static_cast<size_t>(rank_)).published.store(++published_, std::memory_order_release);
  return true;
}

void ShmDataPlane::reduce_share(const Chunk& chunk, uint64_t number, Range range) {
  const Descriptor& d = chunk.task->batch->descriptor();
  const size_t element = size_of(d.dtype);
  const DType type = accumulation_type(d.dtype);
  const bool narrow_after = type != d.dtype;
  alignas(64) std::byte wide[kBlock * sizeof(float)];
  alignas(64) std::byte incoming[kBlock * sizeof(float)];
  for_pieces(*chunk.task, range, [&](const Operation& o, int64_t from, int64_t at, int64_t count) {
    std::byte* output = output_of(o);
    const int64_t step = narrow_after ? kBlock : count;
    for (int64_t done = 0; done < count; done += step) {
      const int64_t n = std::min(step, count - done);
      const size_t in_slot = static_cast<size_t>(range.begin - chunk.begin + at + done) * element;
      std::byte* result = slot(number, rank_) + in_slot;
      std::byte* sum = narrow_after ? wide : result;
      const auto source = [&](int member) -> const std::byte* {
        return member == rank_ ? input_of(o) + static_cast<size_t>(from + done) * element
                               : slot(number, member) + in_slot;
      };
      widen(d.dtype, sum, source(0), n);
      for (int member = 1; member < size_; ++member) {
        const std::byte* next = source(member);
        if (narrow_after) widen(d.dtype, incoming, next, n);
        reduce_into(type, d.reduce_op, sum, narrow_after ? incoming : next, n);
      }
      if (d.reduce_op == ReduceOp::kAvg) finish_average(type, sum, n, o.contributors_of(size_));
      if (narrow_after) narrow(d.dtype, result, sum, n);
      if (output != nullptr)
        std::memcpy(output + static_cast<size_t>(from + done) * element, result, static_cast<size_t>(n) * element);
    }
  });
}

bool ShmDataPlane::reduce() {
  if (reduced_ == published_ || !all_reached(&Part::published, reduced_ + 1)) return false;
  const Chunk& chunk = chunks_[reduced_ - consumed_];
  if (is_reduction(chunk.task->batch->descriptor().kind)) reduce_share(chunk, reduced_, share(chunk, rank_));
  segment_->part(static_cast<size_t>(rank_)).reduced.store(++reduced_, std::memory_order_release);
  return true;
}

bool ShmDataPlane::consume() {
  if (consumed_ == reduced_ || !all_reached(&Part::reduced, consumed_ + 1)) return false;
  const Chunk chunk = std::move(chunks_.front());
  chunks_.pop_front();
  const Descriptor& d = chunk.task->batch->descriptor();
  const size_t element = size_of(d.dtype);
  for (int member = 0; member < size_; ++member) {
    if (member == rank_) continue;
    const Range range = share(chunk, member);
    const std::byte* base = slot(consumed_, member) + static_cast<size_t>(range.begin - chunk.begin) * element;
    for_pieces(*chunk.task, range, [&](const Operation& o, int64_t from, int64_t at, int64_t count) {
      std::byte* output = output_of(o);
      if (output == nullptr) return;
      std::memcpy(output + static_cast<size_t>(from) * element, base + static_cast<size_t>(at) * element,
                  static_cast<size_t>(count) * element);
    });
  }
  segment_->part(static_cast<size_t>(rank_)).consumed.store(++consumed_, std::memory_order_release);
  if (chunk.last) chunk.task->done->complete(nullptr);
  return true;
}

}  // namespace multicomm::shm
