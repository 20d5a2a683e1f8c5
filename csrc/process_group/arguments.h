// Checks of what a caller hands over, before anything is sent. Each throws the exception that torch's users know:
// ValueError, TypeError, NotImplementedError, with the operation's name.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "coordinator/types.h"

namespace multicomm {

const at::Tensor& single_tensor(const char* operation, const std::vector<at::Tensor>& tensors);
void check_dense_cpu(const char* operation, const at::Tensor& tensor);
void check_root(const char* operation, int64_t root, int size);
// One tensor per rank, all of `dtype`.
void check_list(const char* operation, const char* what, const std::vector<at::Tensor>& list, int size,
                at::ScalarType dtype);
void check_same_dtype(const char* operation, const at::Tensor& a, const at::Tensor& b);
ReduceOp to_reduce_op(const char* operation, const c10d::ReduceOp& op, at::ScalarType dtype);
// Elements per rank along dim 0, from split sizes or equally; checks that they add up.
std::vector<int64_t> split_counts(const char* operation, const char* what, const at::Tensor& tensor,
                                  const std::vector<int64_t>& splits, int size);

}  // namespace multicomm
