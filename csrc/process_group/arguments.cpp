#include "process_group/arguments.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <numeric>
#include <ostream>

#include "coordinator/error_text.h"
#include "coordinator/reduce_kernels.h"
#include "process_group/tensor_operation.h"

namespace multicomm {

std::ostream& operator<<(std::ostream& out, const Where& where) {
  return out << error_prefix(where.group) << where.operation;
}

const at::Tensor& single_tensor(const Where& where, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, where, " takes one tensor per call, not ", tensors.size());
  check_dense(where, tensors.front());
  return tensors.front();
}

void check_dense(const Where& where, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), where, ": undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, where, " of ", tensor.layout(),
                              " tensors is not supported; convert it with to_dense()");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu() || at::accelerator::isAccelerator(tensor.device().type()), where,
                              " of tensors on ", tensor.device(),
                              " is not supported; CPU tensors and those of an accelerator are");
}

void check_cpu(const Where& where, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu(), where, " of tensors on ", tensor.device(),
                              " is not supported; convert them with to_dense() or move them to the CPU");
}

void check_writable(const Where& where, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, where,
                    ": elements of a tensor that takes a result share memory (sizes ", tensor.sizes(), ", strides ",
                    tensor.strides(), "); pass a clone()");
}

void check_root(const Where& where, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, where, ": rank ", root, " is not in the group of ", size, " ranks");
}

void check_pair(const Where& where, const at::Tensor& output, const at::Tensor& input) {
  check_dense(where, output);
  check_dense(where, input);
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), where, ": input is ", input.scalar_type(),
                   ", output is ", output.scalar_type());
  check_writable(where, output);
}

void check_list(const Where& where, const char* what, const std::vector<at::Tensor>& list, int size,
                at::ScalarType dtype) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == size, where, ": the ", what, " list has ", list.size(),
                    " tensors, the group has ", size, " ranks");
  for (const at::Tensor& tensor : list) {
    check_dense(where, tensor);
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, where, ": a tensor of the ", what, " list is ",
                     tensor.scalar_type(), ", not ", dtype);
  }
}

ReduceOp to_reduce_op(const Where& where, const c10d::ReduceOp& op, at::ScalarType dtype) {
  ReduceOp result = ReduceOp::kNone;
  switch (op.op_) {
    case c10d::ReduceOp::SUM: result = ReduceOp::kSum; break;
    case c10d::ReduceOp::AVG: result = ReduceOp::kAvg; break;
    case c10d::ReduceOp::PRODUCT: result = ReduceOp::kProduct; break;
    case c10d::ReduceOp::MIN: result = ReduceOp::kMin; break;
    case c10d::ReduceOp::MAX: result = ReduceOp::kMax; break;
    case c10d::ReduceOp::BAND: result = ReduceOp::kBitAnd; break;
    case c10d::ReduceOp::BOR: result = ReduceOp::kBitOr; break;
    case c10d::ReduceOp::BXOR: result = ReduceOp::kBitXor; break;
    case c10d::ReduceOp::PREMUL_SUM: result = ReduceOp::kPremulSum; break;
    default: break;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result != ReduceOp::kNone, where, " with this reduce op is not supported");
  TORCH_CHECK_VALUE(can_reduce(to_dtype(dtype), result), where, ": ", name_of(result), " has no meaning for ", dtype);
  return result;
}

at::Tensor factor_of(const Where& where, const c10d::ReduceOp& op, at::ScalarType dtype) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return {};
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, where, ": PREMUL_SUM without a factor");
  at::Tensor factor = given->tensor_factor.defined() ? given->tensor_factor.detach().reshape({}).cpu()
                                                     : at::scalar_tensor(given->double_factor, at::kDouble);
  TORCH_CHECK_VALUE(c10::isComplexType(dtype) || !factor.is_complex(), where, ": a complex factor for ", dtype);
  if (c10::isIntegralType(dtype, false)) {
    const auto value = factor.to(at::kDouble).item<double>();
    TORCH_CHECK_VALUE(value == std::floor(value), where, ": the factor ", value,
                      " is not a whole number, the tensor is ", dtype);
  }
  return factor.to(dtype, false, true);  // a copy: what the caller does with his tensor afterwards changes nothing
}

std::vector<int64_t> split_counts(const Where& where, const char* what, const at::Tensor& tensor,
                                  const std::vector<int64_t>& splits, int size) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, where, ": the ", what, " has no dimension to split");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> counts = splits;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, where, ": dimension 0 of the ", what, " is ", rows, ", not divisible by the ",
                      size, " ranks of the group");
    counts.assign(static_cast<size_t>(size), rows / size);
  }
  TORCH_CHECK_VALUE(static_cast<int>(counts.size()) == size, where, ": ", counts.size(), " ", what, " splits for ",
                    size, " ranks");
  int64_t sum = 0;
  for (const int64_t count : counts) {
    TORCH_CHECK_VALUE(count >= 0, where, ": negative ", what, " split ", count);
    sum += count;
  }
  TORCH_CHECK_VALUE(sum == rows, where, ": the ", what, " splits add up to ", sum, ", dimension 0 is ", rows);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  for (int64_t& count : counts) count *= row;
  return counts;
}

}  // namespace multicomm
