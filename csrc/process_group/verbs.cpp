// The package's own verbs: a call becomes operations and a Handle, with nothing of torch.distributed in between.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>

#include "coordinator/reduce_kernels.h"
#include "process_group/process_group.h"
#include "process_group/profiling.h"
#include "process_group/sparse_operation.h"
#include "process_group/variable_operation.h"

namespace multicomm {
namespace {

using TensorOperationPtr = std::shared_ptr<TensorOperation>;

void check_reduction(const Where& where, ReduceOp op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(can_reduce(to_dtype(dtype), op), where, ": ", name_of(op), " has no meaning for ", dtype,
                    "; cast the tensor first");
}

// As a tensor of one element; undefined for 1.
at::Tensor scale(const Where& where, const char* what, double factor, at::ScalarType dtype) {
  if (factor == 1) return {};
  TORCH_CHECK_VALUE(dtype != at::kBool, where, ": ", what, " of bool");
  TORCH_CHECK_VALUE(!c10::isIntegralType(dtype, true) || factor == std::floor(factor), where, ": ", what, " ", factor,
                    " is not a whole number, the tensor is ", dtype, "; cast it to a floating-point dtype first");
  return at::scalar_tensor(factor, at::kDouble).to(dtype);
}

at::Tensor new_output(const at::Tensor& input, at::IntArrayRef sizes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::empty(sizes, input.options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor with_dimension(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.dim() == 0 ? tensor.reshape({1}) : tensor;
}

// Ends the profiler's event, where one runs.
std::function<void()> profiled(const char* title) {
  if (!at::hasCallbacks()) return nullptr;
  auto event = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!event->isActive()) return nullptr;
  event->_setAsync();
  event->before(title, c10::ArrayRef<const c10::IValue>{});
  return [event] { event->end(); };
}

// The root's part of a broadcast whose result is a new tensor. The copy is made when the operation is over: until then
// others may be in line for the tensor.
class CopyingBroadcast final : public TensorOperation {
 public:
  CopyingBroadcast(const at::Tensor& tensor, const at::Tensor& copy, int root, int shown_root)
      : TensorOperation(OpKind::kBroadcast, ReduceOp::kNone, tensor.scalar_type(), root, shown_root), tensor_(tensor) {
    result = copy;
    add_input(tensor);
  }
  void finish() override {
    TensorOperation::finish();
    const at::AutoDispatchBelowADInplaceOrView guard;
    result.copy_(tensor_);
  }

 private:
  const at::Tensor tensor_;
};

Handle::Form form_of(const VerbOptions& options) {
  return options.grouped ? Handle::Form::kList : Handle::Form::kTensor;
}

}  // namespace

int ProcessGroupMulticomm::group_rank(const Where& where, int root) const {
  const auto& ranks = group_->info().ranks;
  const auto found = std::find(ranks.begin(), ranks.end(), root);
  TORCH_CHECK_VALUE(found != ranks.end(), where, ": root_rank ", root,
                    " is not a member; root_rank is a global rank, one of those in the brackets");
  return static_cast<int>(found - ranks.begin());
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::submit_verb(const char* title, Handle::Form form,
                                                                    std::vector<TensorOperationPtr> operations,
                                                                    const VerbOptions& options, at::Tensor second) {
  if (options.name != nullptr) {
    const bool several = options.grouped || operations.size() > 1;
    for (size_t i = 0; i < operations.size(); ++i)
      operations[i]->name = several ? options.name + ('.' + std::to_string(i)) : options.name;
  }
  admit(operations, title, c10d::kUnsetTimeout);
  auto on_done = profiled(title);
  if (on_done || timing_.load(std::memory_order_relaxed)) {
    auto state = std::make_shared<WorkState>(Tensors(), operations.size());
    for (const auto& operation : operations) operation->work = state;
    if (on_done) state->profile(std::move(on_done));
    observe(*state, {c10d::OpType::UNKNOWN, title, c10d::kUnsetTimeout, true}, operations);
  }
  const ProfilerRecord record(operations);
  release(operations, true);
  if (record.wanted()) {
    const Tensors none;
    record.submitted({title, true, getGroupUid(), getGroupDesc(), group_->info(), none, none}, *operations.front());
  }
  // Of several steps the caller gets the last one's result.
  if (form == Handle::Form::kPair) operations.erase(operations.begin(), operations.end() - 1);
  return std::make_shared<Handle>(form, std::move(operations), std::move(second));
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_all_reduce(const Tensors& tensors,
                                                                        const VerbOptions& options) {
  const Where where = at("allreduce");
  std::vector<TensorOperationPtr> operations;
  operations.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_sparse()) {
      check_cpu(where, tensor);
      TORCH_CHECK_VALUE(
          (options.op == ReduceOp::kSum || options.op == ReduceOp::kAvg) && options.before == 1 && options.after == 1,
          where, ": of sparse tensors Sum and Average are supported, without factors");
      check_reduction(where, options.op, tensor.scalar_type());
      const at::AutoDispatchBelowADInplaceOrView guard;
      at::Tensor result = options.in_place ? tensor : tensor.clone();
      operations.push_back(std::make_shared<SparseAllReduce>(result, options.op));
      operations.back()->result = std::move(result);
      continue;
    }
    check_dense(where, tensor);
    const at::ScalarType dtype = tensor.scalar_type();
    check_reduction(where, options.op, dtype);
    auto operation = make(OpKind::kAllReduce, options.op, dtype);
    operation->descriptor.count = static_cast<uint64_t>(tensor.numel());
    operation->mix_sizes(tensor.sizes());
    operation->premultiply(scale(where, "prescale_factor", options.before, dtype));
    operation->postmultiply(scale(where, "postscale_factor", options.after, dtype));
    if (options.in_place) {
      check_writable(where, tensor);
      operation->add_in_place(tensor);
      operation->result = tensor;
    } else {
      operation->result = new_output(tensor, tensor.sizes());
      operation->add_input(tensor);
      operation->add_output(operation->result);
    }
    operations.push_back(std::move(operation));
  }
  return submit_verb("multicomm:allreduce", form_of(options), std::move(operations), options);
}

// Rows are dealt out as evenly as they can be: the first ranks get the ones that are over.
ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_reduce_scatter(const Tensors& tensors,
                                                                            const VerbOptions& options) {
  const Where where = at("reducescatter");
  std::vector<TensorOperationPtr> operations;
  for (const at::Tensor& tensor : tensors) {
    check_dense(where, tensor);
    TORCH_CHECK_VALUE(tensor.dim() > 0, where, ": a scalar has no dimension to scatter; pass tensor.reshape(1)");
    const at::ScalarType dtype = tensor.scalar_type();
    check_reduction(where, options.op, dtype);
    auto operation = make(OpKind::kReduceScatter, options.op, dtype);
    operation->premultiply(scale(where, "prescale_factor", options.before, dtype));
    operation->postmultiply(scale(where, "postscale_factor", options.after, dtype));
    const int64_t rows = tensor.size(0), each = rows / size_, over = rows % size_;
    const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
    std::vector<int64_t> counts;
    for (int rank = 0; rank < size_; ++rank) counts.push_back((each + (rank < over ? 1 : 0)) * row);
    std::vector<int64_t> shape = tensor.sizes().vec();
    shape[0] = each + (rank_ < over ? 1 : 0);
    operation->result = new_output(tensor, shape);
    operation->add_split_input(tensor, counts);
    operation->add_output(operation->result);
    operation->descriptor.count = over == 0 ? static_cast<uint64_t>(each * row) : kUneven;
    operation->mix_sizes(tensor.sizes());
    operations.push_back(std::move(operation));
  }
  return submit_verb("multicomm:reducescatter", form_of(options), std::move(operations), options);
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_broadcast(const Tensors& tensors, int root,
                                                                       const VerbOptions& options) {
  const Where where = at("broadcast");
  const int group_root = group_rank(where, root);
  std::vector<TensorOperationPtr> operations;
  for (const at::Tensor& tensor : tensors) {
    check_dense(where, tensor);
    TensorOperationPtr operation;
    const bool root_here = group_root == rank_;
    if (options.in_place || !root_here) {
      operation = make(OpKind::kBroadcast, ReduceOp::kNone, tensor.scalar_type(), group_root);
      operation->result = options.in_place ? tensor : new_output(tensor, tensor.sizes());
      if (root_here) operation->add_input(operation->result);
      else operation->add_output(operation->result);
    } else {
      operation = std::make_shared<CopyingBroadcast>(tensor, new_output(tensor, tensor.sizes()), group_root, root);
    }
    if (options.in_place) check_writable(where, tensor);
    operation->descriptor.count = static_cast<uint64_t>(tensor.numel());
    operation->mix_sizes(tensor.sizes());
    operations.push_back(std::move(operation));
  }
  return submit_verb("multicomm:broadcast", form_of(options), std::move(operations), options);
}

// What each member says: of `own`, this rank's element (`from_each`) or all of it, which is one. Waits for the members.
std::vector<int64_t> ProcessGroupMulticomm::sizes_of_members(const at::Tensor& own, bool from_each,
                                                             const VerbOptions& options) {
  const at::Tensor all = at::empty({size_}, at::kLong);
  const std::vector<int64_t> one_each(static_cast<size_t>(size_), 1);
  auto operation = make(from_each ? OpKind::kAllToAll : OpKind::kAllGather, ReduceOp::kNone, at::kLong);
  if (from_each) operation->add_split_input(own, one_each);
  else operation->add_input(own);
  operation->add_split_output(all, one_each);
  operation->descriptor.count = from_each ? 0 : 1;
  if (from_each) balance_pieces(*operation, rank_);
  const std::string name = options.name == nullptr ? "" : std::string(options.name) + ".sizes";
  VerbOptions own_options;
  if (options.name != nullptr) own_options.name = name.c_str();
  submit_verb("multicomm:sizes", Handle::Form::kNothing, {operation}, own_options)->wait();
  const auto* sizes = all.const_data_ptr<int64_t>();
  return {sizes, sizes + size_};
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_all_gather(const Tensors& tensors,
                                                                        const VerbOptions& options) {
  const Where where = at("allgather");
  std::vector<TensorOperationPtr> operations;
  for (const at::Tensor& given : tensors) {
    check_dense(where, given);
    const at::Tensor tensor = with_dimension(given);
    if (tensor.is_cpu()) {
      operations.push_back(std::make_shared<VariableGather>(tensor));
      continue;
    }
    // The engine cannot allocate on a device, so the sizes are asked for first.
    std::vector<int64_t> counts = sizes_of_members(at::full({1}, tensor.size(0), at::kLong), false, options);
    const std::vector<int64_t> shape = shape_of_rows(tensor, counts);
    auto operation = make(OpKind::kAllGather, ReduceOp::kNone, tensor.scalar_type());
    operation->result = new_output(tensor, shape);
    const int64_t row = shape[0] == 0 ? 0 : operation->result.numel() / shape[0];
    for (int64_t& count : counts) count *= row;
    operation->add_input(tensor);
    operation->add_split_output(operation->result, counts);
    operation->descriptor.count = kUneven;
    operation->mix_sizes(operation->result.sizes());
    operations.push_back(std::move(operation));
  }
  return submit_verb("multicomm:allgather", form_of(options), std::move(operations), options);
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_all_to_all(const at::Tensor& tensor,
                                                                        const std::vector<int64_t>& splits,
                                                                        const VerbOptions& options) {
  const Where where = at("alltoall");
  check_dense(where, tensor);
  split_counts(where, "input", tensor, splits, size_);  // checks
  const at::Tensor rows =
      splits.empty() ? at::full({size_}, tensor.size(0) / size_, at::kLong) : at::tensor(splits, at::kLong);
  if (tensor.is_cpu()) {
    const at::Tensor received = at::empty({size_}, at::kLong);
    auto sizes = std::make_shared<SplitsExchange>(tensor, rows, received, rank_);
    auto exchange = std::make_shared<VariableExchange>(tensor, rows, received, sizes, rank_);
    return submit_verb("multicomm:alltoall", Handle::Form::kPair, {sizes, exchange}, options, received);
  }
  const std::vector<int64_t> received = sizes_of_members(rows, true, options);  // as in all_gather
  auto operation = make(OpKind::kAllToAll, ReduceOp::kNone, tensor.scalar_type());
  operation->result = new_output(tensor, shape_of_rows(tensor, received));
  operation->add_split_input(tensor, split_counts(where, "input", tensor, splits, size_));
  operation->add_split_output(operation->result, split_counts(where, "output", operation->result, received, size_));
  balance_pieces(*operation, rank_);
  return submit_verb("multicomm:alltoall", Handle::Form::kPair, {operation}, options, at::tensor(received, at::kLong));
}

ProcessGroupMulticomm::HandlePtr ProcessGroupMulticomm::verb_barrier() {
  return submit_verb("multicomm:barrier", Handle::Form::kNothing, {make(OpKind::kBarrier, ReduceOp::kNone, at::kByte)},
                     {});
}

}  // namespace multicomm
