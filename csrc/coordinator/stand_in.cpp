#include "coordinator/stand_in.h"

#include "coordinator/reduce_kernels.h"
#include "coordinator/segments.h"

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

void lay_out_stand_in(Operation& stand_in, const Descriptor& agreed, int group_size) {
  stand_in.descriptor = agreed;
  stand_in.abandoned = true;
  stand_in.owns_buffers = true;
  const Segment all{nullptr, static_cast<int64_t>(agreed.count)};
  if (agreed.kind == OpKind::kReduceScatter) stand_in.inputs.assign(static_cast<size_t>(group_size), all);
  else if (is_reduction(agreed.kind)) stand_in.inputs = {all};
  else if (agreed.kind == OpKind::kGatherVariable) stand_in.inputs = {{nullptr, 0}};
  const bool receives = agreed.kind != OpKind::kReduce && agreed.kind != OpKind::kGatherVariable;
  if (receives) stand_in.outputs = {all};
}

StandIn::StandIn(const Descriptor& agreed, int group_size) { lay_out_stand_in(*this, agreed, group_size); }

std::string StandIn::describe() const {
  return std::string(name_of(descriptor.kind)) + ", in which this rank brings nothing";
}

void StandIn::prepare() {
  prepared = true;
  if (!is_reduction(descriptor.kind)) return;
  const int64_t total = total_count(inputs);
  const size_t element = size_of(descriptor.dtype);
  identity_.resize(static_cast<size_t>(total) * element);
  fill_identity(descriptor.dtype, descriptor.reduce_op, identity_.data(), total);
  place(inputs, identity_.data(), element);
}

void StandIn::set_piece_sizes(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) outputs.push_back({nullptr, size});
}

}  // namespace multicomm
