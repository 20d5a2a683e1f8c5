#include "process_group/arguments.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "coordinator/reduce_kernels.h"
#include "process_group/tensor_operation.h"

namespace multicomm {

const at::Tensor& single_tensor(const char* operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "multicomm: ", operation, " takes one tensor per call, not ", tensors.size());
  check_dense_cpu(operation, tensors.front());
  return tensors.front();
}

void check_dense_cpu(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "multicomm: ", operation, ": undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "multicomm: ", operation, " of ", tensor.layout(),
                              " tensors is not supported; convert it with to_dense()");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu(), "multicomm: ", operation, " of tensors on ", tensor.device(),
                              " is not supported; this build moves CPU tensors");
}

void check_root(const char* operation, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "multicomm: ", operation, ": rank ", root, " is not in the group of ",
                    size, " ranks");
}

void check_same_dtype(const char* operation, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "multicomm: ", operation, ": input is ", b.scalar_type(),
                   ", output is ", a.scalar_type());
}

void check_list(const char* operation, const char* what, const std::vector<at::Tensor>& list, int size,
                at::ScalarType dtype) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == size, "multicomm: ", operation, ": the ", what, " list has ",
                    list.size(), " tensors, the group has ", size, " ranks");
  for (const at::Tensor& tensor : list) {
    check_dense_cpu(operation, tensor);
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "multicomm: ", operation, ": a tensor of the ", what, " list is ",
                     tensor.scalar_type(), ", not ", dtype);
  }
}

ReduceOp to_reduce_op(const char* operation, const c10d::ReduceOp& op, at::ScalarType dtype) {
  ReduceOp result = ReduceOp::kNone;
  const char* name = "this reduce op";
  switch (op.op_) {
    case c10d::ReduceOp::SUM: result = ReduceOp::kSum; break;
    case c10d::ReduceOp::AVG: result = ReduceOp::kAvg; break;
    case c10d::ReduceOp::PRODUCT: result = ReduceOp::kProduct; break;
    case c10d::ReduceOp::MIN: result = ReduceOp::kMin; break;
    case c10d::ReduceOp::MAX: result = ReduceOp::kMax; break;
    case c10d::ReduceOp::BAND: result = ReduceOp::kBitAnd; break;
    case c10d::ReduceOp::BOR: result = ReduceOp::kBitOr; break;
    case c10d::ReduceOp::BXOR: result = ReduceOp::kBitXor; break;
    case c10d::ReduceOp::PREMUL_SUM: name = "PREMUL_SUM"; break;
    default: break;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result != ReduceOp::kNone, "multicomm: ", operation, " with ", name, " is not supported");
  TORCH_CHECK_VALUE(can_reduce(to_dtype(dtype), result), "multicomm: ", operation, ": ", name_of(result),
                    " has no meaning for ", dtype);
  return result;
}

std::vector<int64_t> split_counts(const char* operation, const char* what, const at::Tensor& tensor,
                                  const std::vector<int64_t>& splits, int size) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, "multicomm: ", operation, ": the ", what, " has no dimension to split");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> counts = splits;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "multicomm: ", operation, ": dimension 0 of the ", what, " is ", rows,
                      ", not divisible by the ", size, " ranks of the group");
    counts.assign(static_cast<size_t>(size), rows / size);
  }
  TORCH_CHECK_VALUE(static_cast<int>(counts.size()) == size, "multicomm: ", operation, ": ", counts.size(), " ", what,
                    " splits for ", size, " ranks");
  int64_t sum = 0;
  for (const int64_t count : counts) {
    TORCH_CHECK_VALUE(count >= 0, "multicomm: ", operation, ": negative ", what, " split ", count);
    sum += count;
  }
  TORCH_CHECK_VALUE(sum == rows, "multicomm: ", operation, ": the ", what, " splits add up to ", sum,
                    ", dimension 0 is ", rows);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  for (int64_t& count : counts) count *= row;
  return counts;
}

}  // namespace multicomm
