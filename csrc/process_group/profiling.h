// What torch's profiler is told of a call, as NCCL's groups tell it: an event "record_param_comms".
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "coordinator/group_state.h"
#include "process_group/tensor_operation.h"

namespace multicomm {

struct ProfiledCall {
  const char* title;  // "multicomm:all_reduce"
  bool async;
  std::string group;  // torch's name
  std::string description;
  const GroupInfo& info;
  const std::vector<at::Tensor>& inputs;
  const std::vector<at::Tensor>& outputs;
};

// Made before the call's operations are submitted, while nobody else touches them; told when they have their numbers.
// Costs a look where no profiler listens.
class ProfilerRecord {
 public:
  explicit ProfilerRecord(const std::vector<std::shared_ptr<TensorOperation>>& operations);
  bool wanted() const { return wanted_; }
  void submitted(const ProfiledCall& call, const TensorOperation& first) const;

 private:
  const bool wanted_;
  int64_t sent_ = 0;      // elements
  int64_t received_ = 0;  // elements
  std::vector<int64_t> sent_pieces_;
  std::vector<int64_t> received_pieces_;
};

}  // namespace multicomm
