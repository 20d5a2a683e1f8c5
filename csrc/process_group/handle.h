// What an asynchronous verb of the package returns.
#pragma once

#include <memory>
#include <vector>

#include "process_group/tensor_operation.h"

namespace multicomm {

// The operations of one call, and what its caller gets for them. Thread-safe, as a Work; lighter than one: no future,
// no profiler's event of its own. Dropping it neither cancels nor waits.
class Handle {
 public:
  using Operations = std::vector<std::shared_ptr<TensorOperation>>;
  enum class Form : uint8_t { kNothing, kTensor, kList, kPair };

  Handle(Form form, Operations operations, at::Tensor second = {})
      : form_(form), operations_(std::move(operations)), second_(std::move(second)) {}

  // Whether wait() will return at once.
  bool poll() const;
  // As Work.wait(): until it is done, or launched on its device. Throws the first error.
  void wait() const;
  Form form() const { return form_; }
  // Valid after wait().
  size_t size() const { return operations_.size(); }
  const at::Tensor& result(size_t index) const { return operations_[index]->result; }
  const at::Tensor& second() const { return second_; }  // of a pair

 private:
  const Form form_;
  const Operations operations_;
  const at::Tensor second_;
};

}  // namespace multicomm
