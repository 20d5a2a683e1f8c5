#include "process_group/variable_operation.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <numeric>
#include <sstream>

namespace multicomm {
namespace {

int64_t row_elements(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (const int64_t size : tensor.sizes().slice(1)) elements *= size;
  return elements;
}

void mix_row(TensorOperation& operation, const at::Tensor& tensor) {
  operation.descriptor.count = kUneven;
  operation.mix_equal(static_cast<uint64_t>(tensor.dim()));
  for (const int64_t size : tensor.sizes().slice(1)) operation.mix_equal(static_cast<uint64_t>(size));
}

// With room for so many rows from each member; its pieces become the operation's outputs.
at::Tensor make_result(TensorOperation& operation, const at::Tensor& like, at::IntArrayRef rows) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor result = at::empty(shape_of_rows(like, rows), like.options());
  auto* at = static_cast<std::byte*>(result.data_ptr());
  for (const int64_t count : rows) {
    operation.outputs.push_back({at, count * row_elements(like)});
    at += operation.outputs.back().count * static_cast<int64_t>(like.element_size());
  }
  return result;
}

std::vector<int64_t> pieces_of(const at::Tensor& tensor, const at::Tensor& splits) {
  const auto* rows = splits.const_data_ptr<int64_t>();
  std::vector<int64_t> counts(rows, rows + splits.numel());
  for (int64_t& count : counts) count *= row_elements(tensor);
  return counts;
}

std::string shown(const char* what, const at::Tensor& tensor) {
  std::ostringstream text;
  text << what << " of " << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  return text.str();
}

uint64_t pair_hash(int from, int to, int64_t count) {
  return hash_combine(mix(static_cast<uint64_t>(from)) + static_cast<uint64_t>(to), static_cast<uint64_t>(count));
}

}  // namespace

std::vector<int64_t> shape_of_rows(const at::Tensor& like, at::IntArrayRef rows) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  return shape;
}

void balance_pieces(Operation& operation, int rank) {
  for (size_t peer = 0; peer < operation.inputs.size(); ++peer) {
    const auto other = static_cast<int>(peer);
    operation.descriptor.checksum += pair_hash(rank, other, operation.inputs[peer].count);
    operation.descriptor.checksum -= pair_hash(other, rank, operation.outputs[peer].count);
  }
}

VariableGather::VariableGather(const at::Tensor& tensor)
    : TensorOperation(OpKind::kGatherVariable, ReduceOp::kNone, tensor.scalar_type(), -1, -1), tensor_(tensor) {
  mix_row(*this, tensor);
  add_input(tensor);
}

std::string VariableGather::describe() const { return shown("all_gather of variable sizes", tensor_); }

int64_t VariableGather::piece_size() const { return tensor_.size(0); }

void VariableGather::set_piece_sizes(const std::vector<int64_t>& sizes) { result = make_result(*this, tensor_, sizes); }

SplitsExchange::SplitsExchange(const at::Tensor& tensor, const at::Tensor& splits, const at::Tensor& received, int rank)
    : TensorOperation(OpKind::kAllToAll, ReduceOp::kNone, at::kLong, -1, -1), tensor_(tensor) {
  const std::vector<int64_t> one_each(static_cast<size_t>(splits.numel()), 1);
  add_split_input(splits, one_each);
  add_split_output(received, one_each);
  balance_pieces(*this, rank);
  result = received;
}

std::string SplitsExchange::describe() const { return shown("the splits of an all_to_all", tensor_); }

VariableExchange::VariableExchange(const at::Tensor& tensor, const at::Tensor& splits, const at::Tensor& received,
                                   std::shared_ptr<const SplitsExchange> sizes, int rank)
    : TensorOperation(OpKind::kAllToAll, ReduceOp::kNone, tensor.scalar_type(), -1, -1),
      tensor_(tensor),
      splits_(splits),
      received_(received),
      sizes_(std::move(sizes)),
      rank_(rank) {
  mix_row(*this, tensor);
  descriptor.count = 0;
  add_split_input(tensor, pieces_of(tensor, splits));
  const auto begin = reinterpret_cast<uintptr_t>(received.const_data_ptr());
  ranges.push_back({begin, begin + received.nbytes(), false});
}

std::string VariableExchange::describe() const { return shown("all_to_all of variable sizes", tensor_); }

ErrorPtr VariableExchange::hopeless() const { return sizes_->done() ? sizes_->error() : nullptr; }

void VariableExchange::prepare() {
  TensorOperation::prepare();
  const auto* rows = received_.const_data_ptr<int64_t>();
  result = make_result(*this, tensor_, {rows, static_cast<size_t>(received_.numel())});
  balance_pieces(*this, rank_);
}

}  // namespace multicomm
