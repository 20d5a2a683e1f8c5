// all_reduce of a sparse COO tensor: every rank's entries are gathered, then added up by each rank alike.
#pragma once

#include "process_group/tensor_operation.h"

namespace multicomm {

// The ranks' entries differ in number, which is known only once the tensor may be read; so they travel as a gather of
// variable size, packed as [indices | values]. Sums, or averages.
class SparseAllReduce final : public TensorOperation {
 public:
  // `tensor`: sparse COO on the CPU, sizes equal on all ranks; takes the coalesced result.
  SparseAllReduce(const at::Tensor& tensor, ReduceOp reduce_op);

  std::string describe() const override;
  void prepare() override;
  void set_piece_sizes(const std::vector<int64_t>& sizes) override;
  void finish() override;

 private:
  at::Tensor tensor_;
  at::Tensor own_;                    // packed, uint8
  std::vector<at::Tensor> gathered_;  // by group rank, packed
};

}  // namespace multicomm
