#include "process_group/sparse_operation.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <sstream>

namespace multicomm {

SparseAllReduce::SparseAllReduce(const at::Tensor& tensor, ReduceOp reduce_op)
    : TensorOperation(OpKind::kGatherVariable, ReduceOp::kNone, tensor.scalar_type(), -1, -1), tensor_(tensor) {
  descriptor.dtype = DType::kUint8;
  descriptor.reduce_op = reduce_op;
  descriptor.count = kUneven;
  mix_equal(static_cast<uint64_t>(tensor.sparse_dim()));
  for (const int64_t size : tensor.sizes()) mix_equal(static_cast<uint64_t>(size));
  // Not the entries' memory, which a result replaces: the tensor itself stands for them.
  const auto identity = reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl());
  ranges.push_back({identity, identity + 1, true});
}

std::string SparseAllReduce::describe() const {
  std::ostringstream text;
  text << "all_reduce(" << name_of(descriptor.reduce_op) << ") of sparse " << c10::toString(scalar_type) << ' '
       << tensor_.sizes();
  return text.str();
}

void SparseAllReduce::prepare() {
  owns_buffers = true;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor entries = tensor_.coalesce();
  const auto bytes = [](const at::Tensor& part) { return part.contiguous().view({-1}).view(at::kByte); };
  own_ = at::cat({bytes(entries._indices()), bytes(entries._values())});
  inputs = {{static_cast<std::byte*>(own_.data_ptr()), own_.numel()}};
}

void SparseAllReduce::set_piece_sizes(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) {
    gathered_.push_back(at::empty({size}, at::kByte));
    outputs.push_back({static_cast<std::byte*>(gathered_.back().data_ptr()), size});
  }
}

void SparseAllReduce::finish() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t dims = tensor_.sparse_dim();
  std::vector<int64_t> entry(tensor_.sizes().begin() + dims, tensor_.sizes().end());
  int64_t elements = 1;
  for (const int64_t size : entry) elements *= size;
  const int64_t index_bytes = dims * static_cast<int64_t>(sizeof(int64_t));
  const int64_t entry_bytes = index_bytes + elements * static_cast<int64_t>(c10::elementSize(scalar_type));
  std::vector<at::Tensor> indices, values;
  for (const at::Tensor& piece : gathered_) {
    const int64_t count = piece.numel() / entry_bytes;
    std::vector<int64_t> shape = entry;
    shape.insert(shape.begin(), count);
    // Copies: a view as int64 or as the dtype needs its alignment.
    indices.push_back(piece.narrow(0, 0, count * index_bytes).clone().view(at::kLong).view({dims, count}));
    values.push_back(piece.narrow(0, count * index_bytes, piece.numel() - count * index_bytes)
                         .clone()
                         .view(scalar_type)
                         .view(shape));
  }
  at::Tensor all = at::cat(values);
  // Half precision is added in fp32 and rounded once, as in the other reductions.
  const bool half = scalar_type == at::kHalf || scalar_type == at::kBFloat16;
  if (half) all = all.to(at::kFloat);
  at::Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), all, tensor_.sizes()).coalesce();
  if (descriptor.reduce_op == ReduceOp::kAvg) {
    const auto ranks = static_cast<int64_t>(contributors_of(static_cast<int>(gathered_.size())));
    if (c10::isIntegralType(scalar_type, true)) sum._values().div_(ranks, "trunc");
    else sum._values().div_(ranks);
  }
  if (half) sum = sum.to(scalar_type);
  tensor_.copy_(sum);
  gathered_.clear();
}

}  // namespace multicomm
