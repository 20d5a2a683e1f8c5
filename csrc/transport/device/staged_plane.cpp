#include "transport/device/staged_plane.h"

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "coordinator/segments.h"
#include "transport/device/device_operation.h"
#include "transport/device/nccl_calls.h"

namespace multicomm::device {
namespace {

int64_t largest_count(const Operation& operation) {
  int64_t largest = 0;
  for (const auto* segments : {&operation.inputs, &operation.outputs})
    for (const Segment& s : *segments) largest = std::max(largest, s.count);
  return largest;
}

constexpr int kTag = -1;  // of messages; monitored barriers have -2 and below

// Whether all members cut it alike. Messages are cut by their pair; of uneven pieces only their owners know the sizes.
bool can_be_cut(const Batch& batch) { return !batch.fused() && batch.descriptor().count != kUneven; }

}  // namespace

bool mpi_takes_device_memory() {
  using Query = int (*)();
  static const auto query = reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support"));
  static const bool does = query != nullptr && query() == 1;
  return does;
}

void begin(Launcher& launcher, const Batch& batch) {
  const c10::Event* last = nullptr;
  for (const OperationPtr& o : batch.operations) {
    const auto& operation = static_cast<const DeviceOperation&>(*o);
    if (operation.ready.get() != last) operation.ready->block(launcher.stream());
    last = operation.ready.get();
    o->prepare();
  }
}

std::shared_ptr<c10::Event> finish(Launcher& launcher, const Batch& batch) {
  for (const OperationPtr& o : batch.operations) o->finish();
  auto event = launcher.record();
  for (const OperationPtr& o : batch.operations) static_cast<DeviceOperation&>(*o).event = event;
  return event;
}

void after_the_stream(Launcher& launcher, std::shared_ptr<c10::Event> event,
                      std::function<void(const std::string* error)> then) {
  try {
    if (!event) event = launcher.record();
  } catch (const std::exception& error) {  // a device that refuses even this does nothing more
    const std::string why = error.what();
    return then(&why);
  }
  launcher.when_done(std::move(event), std::move(then));
}

// Part of an operation of the device, as the CPU plane moves it: on its host copy, or on device memory.
class StagedPlane::HostOperation final : public mpi::OwnMessage {
 public:
  std::string describe() const override {
    const OperationPtr whole = of.lock();
    return (whole ? whole->describe() : "an operation that is over") + " (staged)";
  }
  void over(const ErrorPtr& error) override { done->complete(error ? &error->message : nullptr); }
  std::weak_ptr<Operation> of;  // which must not be let go of here: that may take the interpreter's lock
  Completion* done = nullptr;
};

struct StagedPlane::Chunk {
  struct Done final : Completion {
    StagedPlane* plane = nullptr;
    FlightPtr flight;  // keeps it while the chunk is on its way
    size_t number = 0;
    void complete(const std::string* error) override {
      plane->chunk_done(std::exchange(flight, nullptr), number, error);
    }
  };
  Batch batch;  // of host operations
  Done done;
  std::vector<at::Tensor> device_inputs, host_inputs, device_outputs, host_outputs;
};

struct StagedPlane::Flight {
  Launcher* launcher = nullptr;
  Batch* batch = nullptr;
  Completion* done = nullptr;
  std::vector<at::Tensor> memory;  // pinned
  std::vector<Chunk> chunks;       // the launcher's until they are started, then each has its place
  size_t remaining = 0;            // the launcher's: chunks that are not over
  std::string error;               // the launcher's
};

StagedPlane::StagedPlane(MPI_Comm communicator, mpi::Requests& requests, const mpi::Types& types, BufferPool& pool,
                         mpi::Messages& messages, int64_t largest_count, int size, int64_t chunk_bytes)
    : plane_(communicator == MPI_COMM_NULL
                 ? nullptr
                 : std::make_unique<mpi::MpiDataPlane>(communicator, requests, types, pool, messages, largest_count)),
      messages_(messages),
      size_(size),
      largest_count_(largest_count),
      // A message's ends need to agree on bytes only, so a chunk is a whole number of elements of any size.
      chunk_bytes_(std::max<int64_t>(16, chunk_bytes / 16 * 16)) {}

void StagedPlane::launch(Launcher& launcher, Batch& batch, Completion& done) {
  auto flight = std::make_shared<Flight>();
  flight->launcher = &launcher;
  flight->batch = &batch;
  flight->done = &done;
  ++flights_;
  launcher.post([this, flight] { stage_out(flight); });
}

void StagedPlane::stage_out(const FlightPtr& flight) {
  Launcher& launcher = *flight->launcher;
  size_t begun = 0;
  try {
    if (aborted_.load()) throw std::runtime_error("given up before it was launched");
    const Batch& batch = *flight->batch;
    begin(launcher, batch);
    const Descriptor& d = batch.descriptor();
    const bool one_each = d.kind != OpKind::kAllReduce && d.kind != OpKind::kBroadcast && d.kind != OpKind::kReduce &&
                          !is_point_to_point(d.kind);
    const int64_t pieces = one_each ? size_ : 1;
    const int64_t chunk_count = std::max<int64_t>(1, chunk_bytes_ / (pieces * static_cast<int64_t>(size_of(d.dtype))));
    const bool in_one_call = may_move_on_device(batch);
    // This rank's own business: its list of outputs may be one tensor's pieces while another's is not.
    const bool on_device = in_one_call && adjacent(batch.operations.front()->outputs, size_of(d.dtype));
    const int64_t largest = largest_count(*batch.operations.front());
    const bool cut = !in_one_call && can_be_cut(batch) && largest > chunk_count;
    flight->chunks.resize(static_cast<size_t>(cut ? (largest + chunk_count - 1) / chunk_count : 1));
    flight->remaining = flight->chunks.size();
    for (const OperationPtr& operation : batch.operations) {
      if (on_device) lay_out_on_device(flight, operation);
      else lay_out_on_host(flight, operation, cut ? chunk_count : INT64_MAX);
    }
    for (size_t k = 0; k < flight->chunks.size(); ++k) {
      Chunk& chunk = flight->chunks[k];
      chunk.done.plane = this;
      chunk.done.number = k;
      for (size_t i = 0; i < chunk.host_inputs.size(); ++i)
        chunk.host_inputs[i].copy_(chunk.device_inputs[i], /*non_blocking=*/true);
      launcher.when_done(launcher.record(), [this, flight, k](const std::string* error) {
        if (error != nullptr) return chunk_over(flight, *error);
        flight->launcher->reports().add([this, flight, k] { start(flight, k); });
      });
      ++begun;
    }
  } catch (const std::exception& error) {  // no memory, or the device refuses
    // The chunks that are under way come to their end first: they use the same memory.
    flight->remaining = begun + 1;
    chunk_over(flight, std::string("staging: ") + error.what());
  }
}

std::shared_ptr<StagedPlane::HostOperation> StagedPlane::part_of(Chunk& chunk, const OperationPtr& operation) {
  auto part = std::make_shared<HostOperation>();
  part->of = operation;
  part->done = &chunk.done;
  part->descriptor = operation->descriptor;
  part->descriptor.device = DeviceKind::kCpu;
  part->peer = operation->peer;
  part->contributors = operation->contributors;
  part->tag = kTag;
  part->owns_buffers = true;
  chunk.batch.operations.push_back(part);
  return part;
}

// Pinned memory for all of the operation, and each chunk's slice of every segment in it.
void StagedPlane::lay_out_on_host(const FlightPtr& flight, const OperationPtr& operation, int64_t chunk_count) {
  const Operation& o = *operation;
  const size_t element = size_of(o.descriptor.dtype);
  const c10::Device device = flight->launcher->device();
  const bool in_place =
      o.inputs.size() == 1 && o.outputs.size() == 1 && o.inputs.front().data == o.outputs.front().data;
  const int64_t count = total_count(o.inputs) + (in_place ? 0 : total_count(o.outputs));
  flight->memory.push_back(
      at::empty({count * static_cast<int64_t>(element)}, at::TensorOptions(at::kByte).pinned_memory(true)));
  auto* const base = static_cast<std::byte*>(flight->memory.back().data_ptr());
  for (size_t k = 0; k < flight->chunks.size(); ++k) {
    Chunk& chunk = flight->chunks[k];
    const auto part = part_of(chunk, operation);
    std::byte* at = base;
    const auto from = [&](int64_t count) {
      return k == 0 ? int64_t{0} : std::min(count, static_cast<int64_t>(k) * chunk_count);
    };
    const auto slice = [&](const std::vector<Segment>& segments, std::vector<Segment>& host,
                           std::vector<at::Tensor>& on_device, std::vector<at::Tensor>& on_host) {
      for (const Segment& s : segments) {
        const int64_t count = std::min(chunk_count, s.count - from(s.count));
        const size_t offset = static_cast<size_t>(from(s.count)) * element;
        host.push_back({at + offset, count});
        if (count > 0) {
          on_device.push_back(as_tensor(s.data + offset, count, element, device));
          on_host.push_back(as_tensor(at + offset, count, element, c10::Device(at::kCPU)));
        }
        at += static_cast<size_t>(s.count) * element;
      }
    };
    slice(o.inputs, part->inputs, chunk.device_inputs, chunk.host_inputs);
    if (in_place) at = base;
    slice(o.outputs, part->outputs, chunk.device_outputs, chunk.host_outputs);
    const bool sized = o.descriptor.kind != OpKind::kAllToAll && !is_point_to_point(o.descriptor.kind) &&
                       o.descriptor.count != kUneven;
    if (!sized) continue;
    const auto whole = static_cast<int64_t>(o.descriptor.count);
    part->descriptor.count = static_cast<uint64_t>(std::min(chunk_count, whole - from(whole)));
  }
}

// MPI that knows device memory is given it for what it moves by itself; where the CPU plane copies or reduces by its
// own code, that is host memory's business. The same on all members, which make the same calls.
bool StagedPlane::may_move_on_device(const Batch& batch) const {
  const Descriptor& d = batch.descriptor();
  // Of more elements than MPI takes in one call the CPU plane copies this rank's piece by itself.
  const bool whole = d.count != kUneven && d.count <= static_cast<uint64_t>(largest_count_ / size_);
  return takes_device_memory_ && !batch.fused() &&
         (d.kind == OpKind::kBroadcast || (d.kind == OpKind::kAllGather && whole));
}

void StagedPlane::lay_out_on_device(const FlightPtr& flight, const OperationPtr& operation) {
  const auto part = part_of(flight->chunks.front(), operation);
  part->inputs = operation->inputs;
  part->outputs = operation->outputs;
}

void StagedPlane::start(const FlightPtr& flight, size_t number) {
  Chunk& chunk = flight->chunks[number];
  chunk.done.flight = flight;
  try {
    if (is_point_to_point(flight->batch->descriptor().kind)) return messages_.post(chunk.batch.operations.front());
    if (plane_ == nullptr) throw std::runtime_error("this group has no communicator for staging");
    plane_->launch(chunk.batch, chunk.done);
  } catch (const std::runtime_error& error) {
    const std::string why = error.what();
    chunk.done.complete(&why);
  } catch (const std::bad_alloc&) {
    const std::string why = "no memory for a buffer";
    chunk.done.complete(&why);
  }
}

void StagedPlane::chunk_done(const FlightPtr& flight, size_t number, const std::string* error) {
  flight->launcher->post([this, flight, number, failed = error == nullptr ? std::string() : *error] {
    if (failed.empty()) stage_in(flight, number);
    else chunk_over(flight, failed);
  });
}

void StagedPlane::stage_in(const FlightPtr& flight, size_t number) {
  std::string error;
  try {
    Chunk& chunk = flight->chunks[number];
    if (aborted_.load()) throw std::runtime_error("given up while it was on its way");
    for (size_t i = 0; flight->error.empty() && i < chunk.host_outputs.size(); ++i)
      chunk.device_outputs[i].copy_(chunk.host_outputs[i], /*non_blocking=*/true);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  chunk_over(flight, error);
}

// The launcher's. With the last chunk, whatever became of it, the flight ends when the stream has passed what it was
// given for it: until then that uses the tensors.
void StagedPlane::chunk_over(const FlightPtr& flight, const std::string& error) {
  if (flight->error.empty()) flight->error = error;
  if (--flight->remaining > 0) return;
  Launcher& launcher = *flight->launcher;
  const auto over = [this, flight, &launcher](const std::string& why) {
    launcher.reports().add([this, flight, why] { end(flight, why.empty() ? nullptr : &why); });
  };
  std::shared_ptr<c10::Event> event;
  try {
    if (flight->error.empty()) {
      event = finish(launcher, *flight->batch);
      launcher.reports().add([flight] { flight->done->launched(); });
    }
  } catch (const std::exception& failure) {
    flight->error = std::string("staging: ") + failure.what();
  }
  after_the_stream(launcher, std::move(event), [over, flight](const std::string* failure) {
    over(flight->error.empty() && failure != nullptr ? *failure : flight->error);
  });
}

void StagedPlane::end(const FlightPtr& flight, const std::string* error) {
  --flights_;
  flight->done->complete(error);
}

}  // namespace multicomm::device
