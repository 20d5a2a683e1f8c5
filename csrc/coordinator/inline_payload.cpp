#include "coordinator/inline_payload.h"

#include <cstring>

#include "coordinator/operation.h"
#include "coordinator/record.h"
#include "coordinator/reduce_kernels.h"

namespace multicomm {
namespace {

constexpr size_t kAlignment = 16;

size_t carried_size(const Descriptor& d) {
  return size_of(is_reduction(d.kind) ? accumulation_type(d.dtype) : d.dtype);
}

void copy_out(const Segment& to, const std::byte* from, size_t element) {
  if (to.count > 0) std::memcpy(to.data, from, static_cast<size_t>(to.count) * element);
}

}  // namespace

std::optional<size_t> InlineLayout::bytes_of(const Descriptor& d) const {
  if (d.device != DeviceKind::kCpu) return std::nullopt;
  uint64_t pieces = 1;
  switch (d.kind) {
    case OpKind::kBarrier: return 0;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast: break;
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kReduceScatter: pieces = group_size_; break;
    case OpKind::kAllToAll:
    case OpKind::kGatherVariable:
    case OpKind::kJoin:
    case OpKind::kSend:
    case OpKind::kRecv: return std::nullopt;
  }
  if (d.count > kInlineBytes || pieces > kInlineBytes) return std::nullopt;
  const uint64_t bytes = d.count * pieces * carried_size(d);
  if (bytes > kInlineBytes) return std::nullopt;
  return bytes;
}

bool InlineLayout::eligible(const Descriptor& d) const { return bytes_of(d).has_value(); }

std::optional<InlineLayout::Slot> InlineLayout::place(const Descriptor& d) {
  const auto bytes = closed_ ? std::nullopt : bytes_of(d);
  if (!bytes || *bytes > kInlineBytes - used_) {
    closed_ = true;
    return std::nullopt;
  }
  const Slot slot{used_, *bytes};
  used_ += (*bytes + kAlignment - 1) / kAlignment * kAlignment;
  return slot;
}

void pack_inline(const Operation& operation, int rank, std::byte* payload) {
  const Descriptor& d = operation.descriptor;
  const size_t element = carried_size(d);
  if (d.kind == OpKind::kAllGather || d.kind == OpKind::kGather) {
    payload += static_cast<size_t>(rank) * d.count * element;
  }
  for (const Segment& s : operation.inputs) {
    if (is_reduction(d.kind)) {
      widen(d.dtype, payload, s.data, s.count);
    } else if (s.count > 0) {
      std::memcpy(payload, s.data, static_cast<size_t>(s.count) * element);
    }
    payload += static_cast<size_t>(s.count) * element;
  }
}

void combine_inline(const Descriptor& d, size_t bytes, const std::byte* in, std::byte* inout) {
  if (is_reduction(d.kind)) {
    const size_t element = carried_size(d);  // 0: a type that a corrupt record made up, which has no bytes either
    const auto count = static_cast<int64_t>(element == 0 ? 0 : bytes / element);
    reduce_into(accumulation_type(d.dtype), d.reduce_op, inout, in, count);
    unify_nans(accumulation_type(d.dtype), inout, count);
  } else {
    for (size_t i = 0; i < bytes; ++i) inout[i] |= in[i];
  }
}

void unpack_inline(Operation& operation, int rank, int group_size, std::byte* payload) {
  const Descriptor& d = operation.descriptor;
  const size_t element = carried_size(d);
  if (d.kind == OpKind::kReduceScatter || d.kind == OpKind::kScatter) {
    payload += static_cast<size_t>(rank) * d.count * element;
  }
  for (const Segment& s : operation.outputs) {
    if (is_reduction(d.kind)) {
      if (d.reduce_op == ReduceOp::kAvg)
        finish_average(accumulation_type(d.dtype), payload, s.count, operation.contributors_of(group_size));
      narrow(d.dtype, s.data, payload, s.count);
    } else {
      copy_out(s, payload, element);
    }
    payload += static_cast<size_t>(s.count) * element;
  }
}

}  // namespace multicomm
