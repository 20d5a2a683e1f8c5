// all_gather and all_to_all whose sizes only their senders know: the results are allocated when all members have come.
#pragma once

#include "process_group/tensor_operation.h"

namespace multicomm {

// Concatenates the members' tensors along dimension 0, which may differ. CPU tensors.
class VariableGather final : public TensorOperation {
 public:
  explicit VariableGather(const at::Tensor& tensor);  // at least one dimension

  std::string describe() const override;
  int64_t piece_size() const override;  // rows: a tensor without elements has some too
  void set_piece_sizes(const std::vector<int64_t>& sizes) override;

 private:
  const at::Tensor tensor_;
};

// Tells each member how many rows it gets from the others; VariableExchange comes right behind it.
class SplitsExchange final : public TensorOperation {
 public:
  // `splits`, `received`: int64, one element per member. `tensor`: what the rows are of, for texts.
  SplitsExchange(const at::Tensor& tensor, const at::Tensor& splits, const at::Tensor& received, int rank);

  std::string describe() const override;

 private:
  const at::Tensor tensor_;
};

// Sends each member its rows of a tensor. Its sizes are read from what the SplitsExchange has received: that memory is
// among what it touches, so that the engine offers it only afterwards. CPU tensors.
class VariableExchange final : public TensorOperation {
 public:
  VariableExchange(const at::Tensor& tensor, const at::Tensor& splits, const at::Tensor& received,
                   std::shared_ptr<const SplitsExchange> sizes, int rank);

  std::string describe() const override;
  ErrorPtr hopeless() const override;
  void prepare() override;

 private:
  const at::Tensor tensor_, splits_, received_;
  const std::shared_ptr<const SplitsExchange> sizes_;
  const int rank_;
};

// The shape of rows of all members, one below the other.
std::vector<int64_t> shape_of_rows(const at::Tensor& like, at::IntArrayRef rows);

// What one member sends to another must be what the other expects from it: each adds its hash on one side and takes it
// away on the other, so the sum over all ranks is 0 exactly when everything fits.
void balance_pieces(Operation& operation, int rank);

}  // namespace multicomm
