// An operation on tensors: what the engine sees as segments of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/device/device_operation.h"

namespace multicomm {

class TensorOperation;

// What one c10d Work stands for: one operation, or all of a coalesced call. Shared by the Work and its operations.
class WorkState {
 public:
  explicit WorkState(std::vector<at::Tensor> outputs, size_t operations)
      : outputs_(std::move(outputs)), remaining_(operations), awaited_(operations) {}
  // Called once per operation, outside all engine locks.
  void one_done(TensorOperation& operation);
  // Of an operation on a device, unless it is done before: its part of the future is there, for streams that wait.
  void one_launched(TensorOperation& operation);
  c10::intrusive_ptr<c10::ivalue::Future> future();
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  // Between submission and the end of the last operation; needs timing (see ProcessGroupMulticomm).
  std::optional<std::chrono::duration<float, std::milli>> duration() const;

  // `end` ends the profiler's event.
  void profile(std::function<void()> end) {
    on_done_ = std::move(end);
    profiled_.store(true);
  }
  bool profiled() const { return profiled_.load(); }  // it has not ended yet

  // Set before submission, as profile() is called.
  std::function<void(const WorkState&)> hook;
  bool timed = false;
  Operation::Clock::time_point started;
  Operation::Clock::time_point finished;  // valid in the hook

 private:
  bool count_down(TensorOperation& operation);
  // Completes the future as things stood when its last operation came; outside the lock.
  struct Completion {
    c10::intrusive_ptr<c10::ivalue::Future> future;  // null: nobody waits
    ErrorPtr error;
    std::vector<std::shared_ptr<c10::Event>> events;
  };
  Completion completion() const { return {future_, error_, events_}; }  // under the lock
  void complete(const Completion& completion) const;

  std::function<void()> on_done_;
  std::atomic<bool> profiled_{false};
  mutable std::mutex mutex_;
  const std::vector<at::Tensor> outputs_;
  size_t remaining_;                                 // guarded by mutex_; of what is not done
  size_t awaited_;                                   // guarded by mutex_; by the future: not launched
  std::vector<std::shared_ptr<c10::Event>> events_;  // guarded by mutex_; behind what is launched, each once
  ErrorPtr error_;                                   // guarded by mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_;   // guarded by mutex_
};

// The exception that a caller sees: torch's DistBackendError.
std::exception_ptr to_exception(const ErrorPtr& error);

class TensorOperation : public DeviceOperation {
 public:
  // `root` is a group rank; `shown_root` is what the user called it (a global rank).
  TensorOperation(OpKind kind, ReduceOp reduce_op, at::ScalarType dtype, int root, int shown_root);

  // Appends a tensor to the inputs, the outputs, or both (an operation in place). It is kept alive until the operation
  // is done; one that is not contiguous is staged.
  void add_input(const at::Tensor& tensor);
  void add_output(const at::Tensor& tensor);
  void add_in_place(const at::Tensor& tensor);
  // Equal consecutive pieces of a contiguous tensor, one per rank.
  void add_split_input(const at::Tensor& tensor, const std::vector<int64_t>& counts);
  void add_split_output(const at::Tensor& tensor, const std::vector<int64_t>& counts);
  // Scales every input added from here on, in a copy; `factor` has one element of the tensors' dtype, or is undefined.
  void premultiply(at::Tensor factor) { factor_ = std::move(factor); }
  // Scales `result` when the operation is done; `factor` as above.
  void postmultiply(at::Tensor factor) { after_ = std::move(factor); }
  void mix_equal(uint64_t value);  // into the descriptor's hash of what must be equal
  void mix_sizes(at::IntArrayRef sizes);

  std::string describe() const override;
  void prepare() override;
  void finish() override;
  void finalize_launch() override;
  void finalize() override;

  // A device that one of its tensors is on while the first is on another one.
  const std::optional<c10::Device>& second_device() const { return second_device_; }
  c10::Device first_device() const { return tensors_.empty() ? c10::Device(c10::kCPU) : tensors_.front().device(); }

  std::shared_ptr<WorkState> work;
  bool counted_for_future = false;  // WorkState's
  at::Tensor result;                // of the package's own verbs: what their caller gets; valid once done
  at::ScalarType scalar_type;

 private:
  struct Staged {
    at::Tensor tensor;
    at::Tensor buffer;
    size_t first_input, inputs;  // segments that lie in `buffer`
    size_t first_output, outputs;
  };
  void add(const at::Tensor& tensor, const std::vector<int64_t>* counts, bool input, bool output);
  void add_ranges(const at::Tensor& tensor, bool write);

  std::vector<at::Tensor> tensors_;
  std::optional<c10::Device> second_device_;
  std::vector<Staged> staged_;
  at::Tensor factor_;
  at::Tensor after_;
  const int shown_root_;
};

DType to_dtype(at::ScalarType type);

}  // namespace multicomm
