// A join, and what stands in for a rank that has joined where the others work on devices.
#pragma once

#include "process_group/tensor_operation.h"

namespace multicomm {

class JoinOperation final : public TensorOperation {
 public:
  // `device`: what this rank's part of operations on devices is to be on; none: it has no device.
  explicit JoinOperation(std::optional<c10::Device> device);
  std::shared_ptr<Operation> stand_in(const Descriptor& agreed, int group_size) const override;

 private:
  const std::optional<c10::Device> device_;
};

// The device of this process that its thread has as the current one, if it has any.
std::optional<c10::Device> current_device();

}  // namespace multicomm
