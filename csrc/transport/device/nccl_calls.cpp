#include "transport/device/nccl_calls.h"

#include <ATen/ATen.h>
#include <ATen/ops/_foreach_copy.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "coordinator/segments.h"

namespace multicomm::device {
namespace {

std::optional<NcclType> real_type(DType dtype) {
  switch (dtype) {
    case DType::kUint8: return kNcclUint8;
    case DType::kInt8: return kNcclInt8;
    case DType::kUint32: return kNcclUint32;
    case DType::kInt32: return kNcclInt32;
    case DType::kUint64: return kNcclUint64;
    case DType::kInt64: return kNcclInt64;
    case DType::kFloat16: return kNcclFloat16;
    case DType::kBFloat16: return kNcclBFloat16;
    case DType::kFloat32: return kNcclFloat32;
    case DType::kFloat64: return kNcclFloat64;
    default: return std::nullopt;
  }
}

at::ScalarType averaged_type(DType dtype) {
  switch (dtype) {
    case DType::kUint8: return at::kByte;
    case DType::kInt8: return at::kChar;
    case DType::kInt16: return at::kShort;
    case DType::kInt32: return at::kInt;
    case DType::kInt64: return at::kLong;
    case DType::kFloat16: return at::kHalf;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kFloat32: return at::kFloat;
    case DType::kFloat64: return at::kDouble;
    case DType::kComplex64: return at::kComplexFloat;
    case DType::kComplex128: return at::kComplexDouble;
    default: throw std::runtime_error(std::string("no average of ") + name_of(dtype) + " on devices");
  }
}

// Builds the calls of one batch.
class Builder {
 public:
  Builder(NcclBatch& all, const Batch& batch, int rank, int size, c10::Device device, bool newer)
      : all_(all),
        batch_(batch),
        d_(batch.descriptor()),
        first_(*batch.operations.front()),
        element_(size_of(d_.dtype)),
        rank_(rank),
        size_(size),
        device_(device),
        newer_(newer) {}

  void build() {
    switch (d_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kBroadcast:
      case OpKind::kReduce: return build_in_place();
      case OpKind::kAllGather: return build_all_gather();
      case OpKind::kReduceScatter: return build_reduce_scatter();
      case OpKind::kAllToAll: return build_all_to_all();
      case OpKind::kGather: return build_gather();
      case OpKind::kScatter: return build_scatter();
      case OpKind::kSend: return send_to(first_.inputs.front(), first_.peer);
      case OpKind::kRecv: return receive_from(first_.outputs.front(), first_.peer);
      case OpKind::kGatherVariable:
      case OpKind::kBarrier:
      case OpKind::kJoin: break;  // never on a device
    }
  }

 private:
  template <typename Call>
  void add(Call call) {
    all_.calls.push_back(std::move(call));
  }
  size_t bytes(int64_t count) const { return static_cast<size_t>(count) * element_; }
  at::Tensor tensor(const Segment& s) const { return as_tensor(s.data, s.count, element_, device_); }

  // A piece of memory for `count` elements; freed when the device is done with the batch.
  std::byte* scratch(int64_t count) {
    all_.scratch.push_back(
        at::empty({static_cast<int64_t>(bytes(count))}, at::TensorOptions(at::kByte).device(device_)));
    return static_cast<std::byte*>(all_.scratch.back().data_ptr());
  }
  // `segments` one after the other at `at`; appends pairs to copy.
  void lay_out(const std::vector<Segment>& segments, std::byte*& at, std::vector<at::Tensor>& outside,
               std::vector<at::Tensor>& inside) const {
    for (const Segment& s : segments) {
      if (s.count > 0) {
        outside.push_back(tensor(s));
        inside.push_back(as_tensor(at, s.count, element_, device_));
      }
      at += bytes(s.count);
    }
  }
  void copy_after(std::vector<at::Tensor> to, std::vector<at::Tensor> from) {
    all_.after.push_back([to = std::move(to), from = std::move(from)] { copy_all(to, from); });
  }
  // NCCL's average divides by all members, of which some have joined and bring nothing.
  bool divides_by_hand() const { return d_.reduce_op == ReduceOp::kAvg && first_.contributors > 0; }
  // Before anything else that comes after the calls.
  void divide_after(std::byte* data, int64_t count) {
    const at::ScalarType type = averaged_type(d_.dtype);
    const at::Tensor sums = as_tensor(data, count, element_, device_).view(type);
    all_.after.insert(all_.after.begin(), [sums, ranks = first_.contributors] {
      if (c10::isIntegralType(sums.scalar_type(), true)) sums.div_(ranks, "trunc");
      else sums.div_(ranks);
    });
  }
  std::byte* gathered(const std::vector<Segment>& segments) {
    if (adjacent(segments, element_)) return first_of(segments);
    std::byte* const base = scratch(total_count(segments));
    std::byte* at = base;
    std::vector<at::Tensor> outside, inside;
    lay_out(segments, at, outside, inside);
    copy_all(inside, outside);
    return base;
  }
  std::byte* to_be_scattered(const std::vector<Segment>& segments) {
    if (adjacent(segments, element_)) return first_of(segments);
    return scattered_from_scratch(segments);
  }
  std::byte* scattered_from_scratch(const std::vector<Segment>& segments) {
    std::byte* const base = scratch(total_count(segments));
    std::byte* at = base;
    std::vector<at::Tensor> outside, inside;
    lay_out(segments, at, outside, inside);
    copy_after(std::move(outside), std::move(inside));
    return base;
  }

  // all_reduce, broadcast, reduce: one operation on its own tensor, or several copied together.
  void build_in_place() {
    std::byte *from = nullptr, *to = nullptr;
    int64_t count = 0;
    for (const OperationPtr& o : batch_.operations) count += static_cast<int64_t>(o->descriptor.count);
    if (count == 0) return;  // on all members
    if (!batch_.fused()) {
      if (!first_.inputs.empty()) from = first_.inputs.front().data;
      if (!first_.outputs.empty()) to = first_.outputs.front().data;
    } else {
      std::byte* const base = scratch(count);
      std::byte* at = base;
      std::vector<at::Tensor> before_out, before_in, after_out, after_in;
      for (const OperationPtr& o : batch_.operations) {
        std::byte *in = at, *out = at;
        lay_out(o->inputs, in, before_out, before_in);
        lay_out(o->outputs, out, after_out, after_in);
        at += bytes(static_cast<int64_t>(o->descriptor.count));
      }
      if (!before_in.empty()) copy_all(before_in, before_out);
      if (!after_out.empty()) copy_after(std::move(after_out), std::move(after_in));
      from = to = base;
    }
    if (from == nullptr) from = to;
    if (to == nullptr) to = from;
    const auto n = static_cast<size_t>(count);
    const int root = d_.root;
    if (d_.kind == OpKind::kBroadcast) {
      return add([=, length = bytes(count)](const NcclApi& api, NcclComm c, void* stream) {
        return api.broadcast(from, to, length, kNcclUint8, root, c, stream);
      });
    }
    const NcclReduction r = *nccl_reduction(d_.dtype, divides_by_hand() ? ReduceOp::kSum : d_.reduce_op);
    if (divides_by_hand() && !first_.outputs.empty()) divide_after(to, count);
    if (d_.kind == OpKind::kAllReduce) {
      return add([=](const NcclApi& api, NcclComm c, void* stream) {
        return api.all_reduce(from, to, n * r.parts, r.type, r.op, c, stream);
      });
    }
    add([=](const NcclApi& api, NcclComm c, void* stream) {
      return api.reduce(from, to, n * r.parts, r.type, r.op, root, c, stream);
    });
  }

  void build_all_gather() {
    const Segment& input = first_.inputs.front();
    const auto& outputs = first_.outputs;
    if (total_count(outputs) == 0) return;
    if (equal_counts(outputs)) {
      std::byte* const to = to_be_scattered(outputs);
      return add([from = input.data, to, length = bytes(input.count)](const NcclApi& api, NcclComm c, void* stream) {
        return api.all_gather(from, to, length, kNcclUint8, c, stream);
      });
    }
    for (int r = 0; r < size_; ++r) {
      const Segment& output = outputs[static_cast<size_t>(r)];
      if (output.count == 0) continue;
      add([from = r == rank_ ? input.data : output.data, to = output.data, length = bytes(output.count), r](
              const NcclApi& api, NcclComm c, void* stream) {
        return api.broadcast(from, to, length, kNcclUint8, r, c, stream);
      });
    }
  }

  void build_reduce_scatter() {
    const auto& inputs = first_.inputs;
    const Segment& output = first_.outputs.front();
    const NcclReduction r = *nccl_reduction(d_.dtype, divides_by_hand() ? ReduceOp::kSum : d_.reduce_op);
    if (total_count(inputs) == 0) return;
    std::byte* to = output.data;
    const Segment& own = inputs[static_cast<size_t>(rank_)];
    for (const Segment& input : inputs) {
      // An output that lies elsewhere in the input than NCCL takes it must not be written while that is read.
      if (overlap(input, output, element_) && !(&input == &own && input.data == output.data)) {
        to = scattered_from_scratch({output});
        break;
      }
    }
    if (divides_by_hand()) divide_after(to, output.count);
    if (equal_counts(inputs)) {
      std::byte* const from = gathered(inputs);
      return add([=, n = static_cast<size_t>(output.count)](const NcclApi& api, NcclComm c, void* stream) {
        return api.reduce_scatter(from, to, n * r.parts, r.type, r.op, c, stream);
      });
    }
    for (int root = 0; root < size_; ++root) {
      const Segment& input = inputs[static_cast<size_t>(root)];
      if (input.count == 0) continue;
      add([from = input.data, to, n = static_cast<size_t>(input.count), r, root](const NcclApi& api, NcclComm c,
                                                                                 void* stream) {
        return api.reduce(from, to, n * r.parts, r.type, r.op, root, c, stream);
      });
    }
  }

  // all_to_all_single(x, x): what arrives must not overwrite what has not been sent.
  std::vector<Segment> apart_from_inputs(std::vector<Segment> outputs) {
    if (!overlap(outputs, first_.inputs, element_)) return outputs;
    place(outputs, scattered_from_scratch(outputs), element_);
    return outputs;
  }

  // Not NCCL's own all-to-all, which needs pieces of one size on all ranks: only each pair knows the sizes of its own.
  void build_all_to_all() {
    const std::vector<Segment> outputs = apart_from_inputs(first_.outputs);
    for (int r = 0; r < size_; ++r) {
      send_to(first_.inputs[static_cast<size_t>(r)], r);
      receive_from(outputs[static_cast<size_t>(r)], r);
    }
  }

  void build_gather() {
    if (d_.count == 0) return;
    const bool root = rank_ == d_.root;
    const Segment& input = first_.inputs.front();
    if (newer_) {
      std::byte* const to = root ? to_be_scattered(first_.outputs) : nullptr;
      return add([from = input.data, to, length = bytes(input.count), at = d_.root](const NcclApi& api, NcclComm c,
                                                                                    void* stream) {
        return api.gather(from, to, length, kNcclUint8, at, c, stream);
      });
    }
    send_to(input, d_.root);
    for (int r = 0; root && r < size_; ++r) receive_from(first_.outputs[static_cast<size_t>(r)], r);
  }

  void build_scatter() {
    if (d_.count == 0) return;
    const bool root = rank_ == d_.root;
    const Segment& output = first_.outputs.front();
    if (newer_) {
      std::byte* const from = root ? gathered(first_.inputs) : nullptr;
      return add([from, to = output.data, length = bytes(output.count), at = d_.root](const NcclApi& api, NcclComm c,
                                                                                      void* stream) {
        return api.scatter(from, to, length, kNcclUint8, at, c, stream);
      });
    }
    for (int r = 0; root && r < size_; ++r) send_to(first_.inputs[static_cast<size_t>(r)], r);
    receive_from(output, d_.root);
  }

  void send_to(const Segment& from, int peer) {
    if (from.count == 0) return;
    add([data = from.data, length = bytes(from.count), peer = place_of(peer)](const NcclApi& api, NcclComm c,
                                                                              void* stream) {
      return api.send(data, length, kNcclUint8, peer, c, stream);
    });
  }
  void receive_from(const Segment& to, int peer) {
    if (to.count == 0) return;
    add([data = to.data, length = bytes(to.count), peer = place_of(peer)](const NcclApi& api, NcclComm c,
                                                                          void* stream) {
      return api.receive(data, length, kNcclUint8, peer, c, stream);
    });
  }
  // Messages have a communicator of their pair.
  int place_of(int peer) const { return is_point_to_point(d_.kind) ? 1 - rank_ : peer; }

  NcclBatch& all_;
  const Batch& batch_;
  const Descriptor& d_;
  const Operation& first_;
  const size_t element_;
  const int rank_;
  const int size_;
  const c10::Device device_;
  const bool newer_;
};

}  // namespace

std::optional<NcclReduction> nccl_reduction(DType dtype, ReduceOp op) {
  if (dtype == DType::kBool) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMax: return NcclReduction{kNcclUint8, kNcclMax, 1};
      case ReduceOp::kProduct:
      case ReduceOp::kMin: return NcclReduction{kNcclUint8, kNcclMin, 1};
      default: return std::nullopt;
    }
  }
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const auto type =
      complex ? std::optional(dtype == DType::kComplex64 ? kNcclFloat32 : kNcclFloat64) : real_type(dtype);
  if (!type) return std::nullopt;
  const size_t parts = complex ? 2 : 1;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum: return NcclReduction{*type, kNcclSum, parts};
    case ReduceOp::kAvg: return NcclReduction{*type, kNcclAvg, parts};
    default: break;
  }
  if (complex) return std::nullopt;
  switch (op) {
    case ReduceOp::kProduct: return NcclReduction{*type, kNcclProd, 1};
    case ReduceOp::kMin: return NcclReduction{*type, kNcclMin, 1};
    case ReduceOp::kMax: return NcclReduction{*type, kNcclMax, 1};
    default: return std::nullopt;
  }
}

bool nccl_serves(const Descriptor& d) { return !is_reduction(d.kind) || nccl_reduction(d.dtype, d.reduce_op); }

at::Tensor as_tensor(std::byte* data, int64_t count, size_t element, c10::Device device) {
  at::ScalarType type = at::kByte;
  switch (element) {
    case 2: type = at::kShort; break;
    case 4: type = at::kInt; break;
    case 8: type = at::kLong; break;
    case 16: type = at::kComplexDouble; break;
    default: break;
  }
  return at::for_blob(data, {count})
      .options(at::TensorOptions(type).device(device))
      .target_device(device)
      .make_tensor();
}

void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (to.size() == 1) to.front().copy_(from.front(), /*non_blocking=*/true);
  else if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

void append(NcclBatch& all, const Batch& batch, int rank, int size, c10::Device device, bool newer) {
  Builder(all, batch, rank, size, device, newer).build();
}

}  // namespace multicomm::device
