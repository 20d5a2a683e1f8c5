// Checks of what a caller hands over, before anything is sent. Each throws the exception that torch's users know:
// ValueError, TypeError, NotImplementedError, with the operation's name.
#pragma once

#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "coordinator/group_state.h"

namespace multicomm {

// Which call of which group an error is about.
struct Where {
  const GroupInfo& group;
  const char* operation;
};
std::ostream& operator<<(std::ostream& out, const Where& where);  // "multicomm: rank 1: group 'x' (ranks [0, 1]): send"

const at::Tensor& single_tensor(const Where& where, const std::vector<at::Tensor>& tensors);
void check_cpu(const Where& where, const at::Tensor& tensor);
// Of a CPU tensor or one on an accelerator.
void check_dense(const Where& where, const at::Tensor& tensor);
// Whether a result can be put into the tensor: no two elements share memory.
void check_writable(const Where& where, const at::Tensor& tensor);
void check_root(const Where& where, int64_t root, int size);
// One tensor per rank, all of `dtype`.
void check_list(const Where& where, const char* what, const std::vector<at::Tensor>& list, int size,
                at::ScalarType dtype);
// Of the calls that take one tensor for the input and one for the output.
void check_pair(const Where& where, const at::Tensor& output, const at::Tensor& input);
ReduceOp to_reduce_op(const Where& where, const c10d::ReduceOp& op, at::ScalarType dtype);
// Of PREMUL_SUM: this rank's factor as a tensor of one element of `dtype`; undefined for every other reduce op.
at::Tensor factor_of(const Where& where, const c10d::ReduceOp& op, at::ScalarType dtype);
// Elements per rank along dim 0, from split sizes or equally; checks that they add up.
std::vector<int64_t> split_counts(const Where& where, const char* what, const at::Tensor& tensor,
                                  const std::vector<int64_t>& splits, int size);

}  // namespace multicomm
