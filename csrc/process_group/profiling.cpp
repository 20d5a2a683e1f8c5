#include "process_group/profiling.h"

#include <ATen/record_function.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>

namespace multicomm {
namespace {

// Tools know all_reduce by NCCL's name; the other names are alike.
std::string collective_name(const char* title) {
  const char* colon = std::strchr(title, ':');
  const std::string name = colon == nullptr ? title : colon + 1;
  return name == "all_reduce" ? "allreduce" : name;
}

// Distance of the members' ranks where that is the same for all, else -1: torch has no other way to tell them.
int stride_of(const std::vector<int>& ranks) {
  if (ranks.size() < 2) return 1;
  const int stride = ranks[1] - ranks[0];
  for (size_t i = 1; i < ranks.size(); ++i)
    if (ranks[i] - ranks[i - 1] != stride || stride <= 0) return -1;
  return stride;
}

}  // namespace

ProfilerRecord::ProfilerRecord(const std::vector<std::shared_ptr<TensorOperation>>& operations)
    : wanted_(at::hasCallbacks() && !operations.empty()) {
  if (!wanted_) return;
  const auto add = [](const std::vector<Segment>& segments, int64_t& count, std::vector<int64_t>& pieces) {
    for (const Segment& s : segments) {
      count += s.count;
      if (segments.size() > 1) pieces.push_back(s.count);
    }
  };
  for (const auto& operation : operations) {
    add(operation->inputs, sent_, sent_pieces_);
    add(operation->outputs, received_, received_pieces_);
  }
}

void ProfilerRecord::submitted(const ProfiledCall& call, const TensorOperation& first) const {
  if (!wanted_) return;
  const auto sequence = std::make_tuple(static_cast<int64_t>(first.sequence), is_point_to_point(first.descriptor.kind));
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(sequence, std::make_tuple(call.group, call.description), call.inputs,
                                        call.outputs, call.info.rank, collective_name(call.title), sent_, received_,
                                        first.scalar_type, sent_pieces_, received_pieces_, call.info.ranks.front(),
                                        stride_of(call.info.ranks), call.info.size(), call.async);
}

}  // namespace multicomm
