#include "coordinator/stand_in.h"

#include "coordinator/reduce_kernels.h"

namespace multicomm {

// An operation with a place for each member has nothing to put into the place of one that brings nothing.
bool joinable(const Descriptor& d) {
  // Where the device's library would divide by all members, torch does by those that bring something, if it can.
  const bool unsigned_type = d.dtype == DType::kUint16 || d.dtype == DType::kUint32 || d.dtype == DType::kUint64;
  if (d.device != DeviceKind::kCpu && d.reduce_op == ReduceOp::kAvg && unsigned_type) return false;
  switch (d.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast:
    case OpKind::kScatter:
    case OpKind::kGatherVariable:
    case OpKind::kBarrier: return true;
    case OpKind::kReduceScatter: return d.count != kUneven;
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
    case OpKind::kGather:
    case OpKind::kJoin:
    case OpKind::kSend:
    case OpKind::kRecv: return false;
  }
  return false;
}

StandIn::StandIn(const Descriptor& agreed, int group_size) {
  descriptor = agreed;
  abandoned = true;  // nobody waits for it, and its output goes nowhere
  owns_buffers = true;
  const auto count = static_cast<int64_t>(agreed.count);
  switch (agreed.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      inputs = {{nullptr, count}};
      outputs = {{nullptr, count}};
      break;
    case OpKind::kReduceScatter:
      inputs.assign(static_cast<size_t>(group_size), {nullptr, count});
      outputs = {{nullptr, count}};
      break;
    case OpKind::kGatherVariable: inputs = {{nullptr, 0}}; break;
    default: outputs = {{nullptr, count}}; break;
  }
}

std::string StandIn::describe() const {
  return std::string(name_of(descriptor.kind)) + ", in which this rank brings nothing";
}

void StandIn::prepare() {
  prepared = true;
  if (!is_reduction(descriptor.kind)) return;
  int64_t total = 0;
  for (const Segment& s : inputs) total += s.count;
  const size_t element = size_of(descriptor.dtype);
  identity_.resize(static_cast<size_t>(total) * element);
  fill_identity(descriptor.dtype, descriptor.reduce_op, identity_.data(), total);
  std::byte* at = identity_.data();
  for (Segment& s : inputs) {
    s.data = at;
    at += static_cast<size_t>(s.count) * element;
  }
}

void StandIn::set_piece_sizes(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) outputs.push_back({nullptr, size});
}

}  // namespace multicomm
