// The c10d Work of one call.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "process_group/runtime.h"
#include "process_group/tensor_operation.h"

namespace multicomm {

// Waits until the operations are done, driving; throws the first error. Of tensors on a device: until they are launched
// there, and makes the current stream wait for the rest. `timeout` > 0 gives up waiting after that time, see
// Work.wait().
void await_operations(const std::vector<std::shared_ptr<TensorOperation>>& operations,
                      std::chrono::milliseconds timeout);

// Thread-safe: any number of threads may wait. Dropping it neither cancels nor waits: the engine keeps the operation.
class MulticommWork final : public c10d::Work {
 public:
  MulticommWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                std::vector<std::shared_ptr<TensorOperation>> operations, std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // Waits until the operation is done; throws its error. Of tensors on a device: until it is launched there, which
  // takes all members' submission, and makes the current stream wait for the rest. `timeout` > 0 gives up waiting after
  // that time with a DistBackendError, while the operation itself goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;  // milliseconds; needs the group's timing, see enableCollectivesTiming
  uint64_t getSequencenumber() const override;

  WorkState& state() { return *state_; }
  const std::vector<std::shared_ptr<TensorOperation>>& operations() const { return operations_; }

 private:
  bool done() const;
  ErrorPtr first_error() const;

  std::vector<std::shared_ptr<TensorOperation>> operations_;
  std::shared_ptr<WorkState> state_;
};

}  // namespace multicomm
