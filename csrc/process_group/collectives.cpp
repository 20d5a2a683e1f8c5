// Every collective of the c10d face: argument checks, descriptor, segments.
#include <climits>
#include <numeric>

#include "coordinator/segments.h"
#include "process_group/arguments.h"
#include "process_group/join_operation.h"
#include "process_group/process_group.h"
#include "process_group/sparse_operation.h"
#include "process_group/variable_operation.h"

namespace multicomm {
namespace {

// Pieces of different size, the same list on every rank: the sizes are compared, there is no common count.
void mix_uneven(TensorOperation& operation, const std::vector<Segment>& segments) {
  operation.descriptor.count = kUneven;
  for (const Segment& s : segments) operation.mix_equal(static_cast<uint64_t>(s.count));
}

}  // namespace

using c10d::OpType;

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make(OpKind kind, ReduceOp op, at::ScalarType dtype,
                                                                      int64_t root) const {
  return std::make_shared<TensorOperation>(kind, op, dtype, static_cast<int>(root), global_rank(root));
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_all_reduce(const at::Tensor& tensor,
                                                                                 const c10d::ReduceOp& op) const {
  check_writable(at("all_reduce"), tensor);
  auto operation =
      make(OpKind::kAllReduce, to_reduce_op(at("all_reduce"), op, tensor.scalar_type()), tensor.scalar_type());
  operation->descriptor.count = static_cast<uint64_t>(tensor.numel());
  operation->mix_sizes(tensor.sizes());
  operation->premultiply(factor_of(at("all_reduce"), op, tensor.scalar_type()));
  operation->add_in_place(tensor);
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, opts);
  const at::Tensor& tensor = single_tensor(at("all_reduce"), tensors);
  return submit({OpType::ALLREDUCE, "multicomm:all_reduce", opts.timeout, opts.asyncOp},
                make_all_reduce(tensor, opts.reduceOp), tensors, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allreduce_coalesced(Tensors& tensors,
                                                                          const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<TensorOperationPtr> operations;
  for (const at::Tensor& tensor : tensors) {
    check_dense(at("all_reduce_coalesced"), tensor);
    operations.push_back(make_all_reduce(tensor, opts.reduceOp));
  }
  return submit({OpType::ALLREDUCE_COALESCED, "multicomm:all_reduce_coalesced", opts.timeout, opts.asyncOp},
                std::move(operations), tensors, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allreduce_sparse(Tensors& tensors,
                                                                       const c10d::AllreduceOptions& opts) {
  const Where where = at("all_reduce");
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors.front().is_sparse(), where, ": takes one sparse COO tensor");
  const at::Tensor& tensor = tensors.front();
  check_cpu(where, tensor);
  const ReduceOp op = to_reduce_op(where, opts.reduceOp, tensor.scalar_type());
  const bool whole = c10::isIntegralType(tensor.scalar_type(), true);
  TORCH_CHECK_VALUE(op == ReduceOp::kSum || (op == ReduceOp::kAvg && !whole), where, ": ", name_of(op), " of sparse ",
                    tensor.scalar_type(), " tensors is not supported, SUM is (and AVG of floats)");
  return submit({OpType::ALLREDUCE, "multicomm:all_reduce", opts.timeout, opts.asyncOp},
                std::make_shared<SparseAllReduce>(tensor, op), {}, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = single_tensor(at("broadcast"), tensors);
  check_root(at("broadcast"), opts.rootRank, size_);
  // Also on the root, which only reads: a call that the others refuse would leave it waiting for them.
  check_writable(at("broadcast"), tensor);
  auto operation = make(OpKind::kBroadcast, ReduceOp::kNone, tensor.scalar_type(), opts.rootRank);
  operation->descriptor.count = static_cast<uint64_t>(tensor.numel());
  operation->mix_sizes(tensor.sizes());
  if (opts.rootRank == rank_) operation->add_input(tensor);
  else operation->add_output(tensor);
  return submit({OpType::BROADCAST, "multicomm:broadcast", opts.timeout, opts.asyncOp}, operation, tensors, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = single_tensor(at("reduce"), tensors);
  check_root(at("reduce"), opts.rootRank, size_);
  check_writable(at("reduce"), tensor);  // on every rank, as above
  auto operation = make(OpKind::kReduce, to_reduce_op(at("reduce"), opts.reduceOp, tensor.scalar_type()),
                        tensor.scalar_type(), opts.rootRank);
  operation->descriptor.count = static_cast<uint64_t>(tensor.numel());
  operation->mix_sizes(tensor.sizes());
  operation->premultiply(factor_of(at("reduce"), opts.reduceOp, tensor.scalar_type()));
  if (opts.rootRank == rank_) operation->add_in_place(tensor);
  else operation->add_input(tensor);
  return submit({OpType::REDUCE, "multicomm:reduce", opts.timeout, opts.asyncOp}, operation, tensors, tensors);
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_all_gather(const Tensors& outputs,
                                                                                 const at::Tensor& input) const {
  check_list(at("all_gather"), "output", outputs, size_, input.scalar_type());
  TORCH_CHECK_VALUE(outputs[static_cast<size_t>(rank_)].numel() == input.numel(), at("all_gather"),
                    ": this rank's input has ", input.numel(), " elements, its place in the output list ",
                    outputs[static_cast<size_t>(rank_)].numel());
  auto operation = make(OpKind::kAllGather, ReduceOp::kNone, input.scalar_type());
  operation->add_input(input);
  for (const at::Tensor& output : outputs) {
    check_writable(at("all_gather"), output);
    operation->add_output(output);
  }
  operation->descriptor.count = static_cast<uint64_t>(input.numel());
  if (equal_counts(operation->outputs)) operation->mix_sizes(input.sizes());
  else mix_uneven(*operation, operation->outputs);
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allgather(TensorLists& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = single_tensor(at("all_gather"), inputs);
  TORCH_CHECK_VALUE(outputs.size() == 1, at("all_gather"), " takes one output list per call, not ", outputs.size());
  return submit({OpType::ALLGATHER, "multicomm:all_gather", opts.timeout, opts.asyncOp},
                make_all_gather(outputs.front(), input), inputs, outputs.front());
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                          const c10d::AllgatherOptions& opts) {
  // One output list per rank, each with a tensor per input.
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_, at("all_gather_coalesced"), ": ", outputs.size(),
                    " output lists for ", size_, " ranks");
  std::vector<TensorOperationPtr> operations;
  Tensors flat;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(at("all_gather_coalesced"), inputs[i]);
    Tensors pieces;
    for (const Tensors& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), at("all_gather_coalesced"), ": an output list has ", list.size(),
                        " tensors for ", inputs.size(), " inputs");
      pieces.push_back(list[i]);
    }
    operations.push_back(make_all_gather(pieces, inputs[i]));
    flat.insert(flat.end(), pieces.begin(), pieces.end());
  }
  return submit({OpType::ALLGATHER_COALESCED, "multicomm:all_gather_coalesced", opts.timeout, opts.asyncOp},
                std::move(operations), inputs, std::move(flat));
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_all_gather_into(const at::Tensor& output,
                                                                                      const at::Tensor& input) const {
  check_pair(at("all_gather_into_tensor"), output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, at("all_gather_into_tensor"), ": the output has ",
                    output.numel(), " elements, ", size_, " inputs of ", input.numel(), " elements do not fill it");
  auto operation = make(OpKind::kAllGather, ReduceOp::kNone, input.scalar_type());
  operation->descriptor.count = static_cast<uint64_t>(input.numel());
  operation->add_input(input);
  operation->add_split_output(output, std::vector<int64_t>(static_cast<size_t>(size_), input.numel()));
  operation->mix_sizes(input.sizes());
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                      const c10d::AllgatherOptions& opts) {
  return submit({OpType::_ALLGATHER_BASE, "multicomm:all_gather_into_tensor", opts.timeout, opts.asyncOp},
                make_all_gather_into(output, input), {input}, {output});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), at("all_gather_into_tensor_coalesced"), ": ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  std::vector<TensorOperationPtr> operations;
  for (size_t i = 0; i < inputs.size(); ++i) operations.push_back(make_all_gather_into(outputs[i], inputs[i]));
  return submit({OpType::COALESCED, "multicomm:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp},
                std::move(operations), inputs, outputs);
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_reduce_scatter(const at::Tensor& output,
                                                                                     const Tensors& inputs,
                                                                                     const c10d::ReduceOp& op) const {
  check_list(at("reduce_scatter"), "input", inputs, size_, output.scalar_type());
  check_writable(at("reduce_scatter"), output);
  TORCH_CHECK_VALUE(inputs[static_cast<size_t>(rank_)].numel() == output.numel(), at("reduce_scatter"),
                    ": this rank's output has ", output.numel(), " elements, its place in the input list ",
                    inputs[static_cast<size_t>(rank_)].numel());
  auto operation =
      make(OpKind::kReduceScatter, to_reduce_op(at("reduce_scatter"), op, output.scalar_type()), output.scalar_type());
  operation->premultiply(factor_of(at("reduce_scatter"), op, output.scalar_type()));
  for (const at::Tensor& input : inputs) operation->add_input(input);
  operation->add_output(output);
  operation->descriptor.count = static_cast<uint64_t>(output.numel());
  if (equal_counts(operation->inputs)) operation->mix_equal(0);
  else mix_uneven(*operation, operation->inputs);
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                                     const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = single_tensor(at("reduce_scatter"), outputs);
  TORCH_CHECK_VALUE(inputs.size() == 1, at("reduce_scatter"), " takes one input list per call, not ", inputs.size());
  return submit({OpType::REDUCE_SCATTER, "multicomm:reduce_scatter", opts.timeout, opts.asyncOp},
                make_reduce_scatter(output, inputs.front(), opts.reduceOp), inputs.front(), outputs);
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_reduce_scatter_from(
    const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const {
  check_pair(at("reduce_scatter_tensor"), output, input);
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, at("reduce_scatter_tensor"), ": the input has ",
                    input.numel(), " elements, ", size_, " outputs of ", output.numel(), " elements need as many");
  auto operation = make(OpKind::kReduceScatter, to_reduce_op(at("reduce_scatter_tensor"), op, output.scalar_type()),
                        output.scalar_type());
  operation->descriptor.count = static_cast<uint64_t>(output.numel());
  operation->premultiply(factor_of(at("reduce_scatter_tensor"), op, output.scalar_type()));
  operation->add_split_input(input, std::vector<int64_t>(static_cast<size_t>(size_), output.numel()));
  operation->add_output(output);
  operation->mix_equal(0);
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                           const c10d::ReduceScatterOptions& opts) {
  return submit({OpType::_REDUCE_SCATTER_BASE, "multicomm:reduce_scatter_tensor", opts.timeout, opts.asyncOp},
                make_reduce_scatter_from(output, input, opts.reduceOp), {input}, {output});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), at("reduce_scatter_tensor_coalesced"), ": ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  std::vector<TensorOperationPtr> operations;
  for (size_t i = 0; i < inputs.size(); ++i)
    operations.push_back(make_reduce_scatter_from(outputs[i], inputs[i], opts.reduceOp));
  return submit({OpType::REDUCE_SCATTER_TENSOR_COALESCED, "multicomm:reduce_scatter_tensor_coalesced", opts.timeout,
                 opts.asyncOp},
                std::move(operations), inputs, outputs);
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::make_all_to_all(
    const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
    const std::vector<int64_t>& input_splits) const {
  check_pair(at("all_to_all_single"), output, input);
  auto operation = make(OpKind::kAllToAll, ReduceOp::kNone, input.scalar_type());
  operation->add_split_input(input, split_counts(at("all_to_all_single"), "input", input, input_splits, size_));
  operation->add_split_output(output, split_counts(at("all_to_all_single"), "output", output, output_splits, size_));
  balance_pieces(*operation, rank_);
  return operation;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                    std::vector<int64_t>& output_splits,
                                                                    std::vector<int64_t>& input_splits,
                                                                    const c10d::AllToAllOptions& opts) {
  return submit({OpType::ALLTOALL_BASE, "multicomm:all_to_all_single", opts.timeout, opts.asyncOp},
                make_all_to_all(output, input, output_splits, input_splits), {input}, {output});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::alltoall(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), at("all_to_all"), ": the input list is empty");
  const at::ScalarType dtype = inputs.front().scalar_type();
  check_list(at("all_to_all"), "input", inputs, size_, dtype);
  check_list(at("all_to_all"), "output", outputs, size_, dtype);
  auto operation = make(OpKind::kAllToAll, ReduceOp::kNone, dtype);
  for (const at::Tensor& tensor : inputs) operation->add_input(tensor);
  for (const at::Tensor& tensor : outputs) {
    check_writable(at("all_to_all"), tensor);
    operation->add_output(tensor);
  }
  balance_pieces(*operation, rank_);
  return submit({OpType::ALLTOALL, "multicomm:all_to_all", opts.timeout, opts.asyncOp}, std::move(operation), inputs,
                outputs);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::gather(TensorLists& outputs, Tensors& inputs,
                                                             const c10d::GatherOptions& opts) {
  const at::Tensor& input = single_tensor(at("gather"), inputs);
  check_root(at("gather"), opts.rootRank, size_);
  auto operation = make(OpKind::kGather, ReduceOp::kNone, input.scalar_type(), opts.rootRank);
  operation->descriptor.count = static_cast<uint64_t>(input.numel());
  operation->mix_sizes(input.sizes());
  operation->add_input(input);
  Tensors results;
  if (opts.rootRank == rank_) {
    TORCH_CHECK_VALUE(outputs.size() == 1, at("gather"), " needs one output list on the destination rank");
    results = outputs.front();
    check_list(at("gather"), "output", results, size_, input.scalar_type());
    for (const at::Tensor& output : results) {
      TORCH_CHECK_VALUE(output.numel() == input.numel(), at("gather"), ": an output has ", output.numel(),
                        " elements, the input ", input.numel());
      check_writable(at("gather"), output);
      operation->add_output(output);
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs.front().empty(), at("gather"),
                      ": only the destination rank has an output list");
  }
  return submit({OpType::GATHER, "multicomm:gather", opts.timeout, opts.asyncOp}, operation, inputs,
                std::move(results));
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::scatter(Tensors& outputs, TensorLists& inputs,
                                                              const c10d::ScatterOptions& opts) {
  const at::Tensor& output = single_tensor(at("scatter"), outputs);
  check_root(at("scatter"), opts.rootRank, size_);
  check_writable(at("scatter"), output);
  auto operation = make(OpKind::kScatter, ReduceOp::kNone, output.scalar_type(), opts.rootRank);
  operation->descriptor.count = static_cast<uint64_t>(output.numel());
  operation->mix_sizes(output.sizes());
  if (opts.rootRank == rank_) {
    TORCH_CHECK_VALUE(inputs.size() == 1, at("scatter"), " needs one input list on the source rank");
    check_list(at("scatter"), "input", inputs.front(), size_, output.scalar_type());
    for (const at::Tensor& input : inputs.front()) {
      TORCH_CHECK_VALUE(input.numel() == output.numel(), at("scatter"), ": an input has ", input.numel(),
                        " elements, the output ", output.numel());
      operation->add_input(input);
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs.front().empty(), at("scatter"),
                      ": only the source rank has an input list");
  }
  operation->add_output(output);
  return submit({OpType::SCATTER, "multicomm:scatter", opts.timeout, opts.asyncOp}, operation, outputs, outputs);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::barrier(const c10d::BarrierOptions& opts) {
  return submit({OpType::BARRIER, "multicomm:barrier", opts.timeout, opts.asyncOp},
                make(OpKind::kBarrier, ReduceOp::kNone, at::kByte), {}, {});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::named_all_reduce(const at::Tensor& tensor,
                                                                       const std::string& name) {
  auto operation = make_all_reduce(tensor, c10d::ReduceOp(c10d::ReduceOp::SUM));
  operation->name = name;
  return submit({OpType::ALLREDUCE, "multicomm:all_reduce", c10d::kUnsetTimeout, true}, std::move(operation), {tensor},
                {tensor});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::named_all_gather(const at::Tensor& output,
                                                                       const at::Tensor& input,
                                                                       const std::string& name) {
  auto operation = make_all_gather_into(output, input);
  operation->name = name;
  return submit({OpType::_ALLGATHER_BASE, "multicomm:all_gather_into_tensor", c10d::kUnsetTimeout, true},
                std::move(operation), {input}, {output});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::named_all_to_all(const at::Tensor& output,
                                                                       const at::Tensor& input,
                                                                       const std::string& name) {
  auto operation = make_all_to_all(output, input, {}, {});
  operation->name = name;
  return submit({OpType::ALLTOALL_BASE, "multicomm:all_to_all_single", c10d::kUnsetTimeout, true}, std::move(operation),
                {input}, {output});
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::join() {
  std::optional<c10::Device> device = current_device();
  if (const int bound = device_.load(); device && bound >= 0)  // that the group's tensors have been on
    device = c10::Device(device->type(), static_cast<c10::DeviceIndex>(bound));
  auto operation = std::make_shared<JoinOperation>(device);
  return submit({OpType::UNKNOWN, "multicomm:join", c10d::kUnsetTimeout, true}, std::move(operation), {}, {});
}

// Tags below 0 are ours.
void ProcessGroupMulticomm::check_tag(const char* operation, int tag) const {
  TORCH_CHECK_VALUE(tag >= 0, at(operation), ": tag ", tag, " is negative; tags are 0 to ", INT_MAX);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = single_tensor(at("send"), tensors);
  check_root(at("send"), destination, size_);
  check_tag("send", tag);
  auto operation = make(OpKind::kSend, ReduceOp::kNone, tensor.scalar_type(), destination);
  operation->peer = destination;
  operation->tag = tag;
  operation->add_input(tensor);
  return submit({OpType::SEND, "multicomm:send", c10d::kUnsetTimeout, true}, operation, tensors, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::receive(Tensors& tensors, int source, int tag, OpType type) {
  const at::Tensor& tensor = single_tensor(at("recv"), tensors);
  check_tag("recv", tag);
  check_writable(at("recv"), tensor);
  auto operation = make(OpKind::kRecv, ReduceOp::kNone, tensor.scalar_type(), source);
  operation->peer = source;
  operation->tag = tag;
  operation->add_output(tensor);
  return submit({type, "multicomm:recv", c10d::kUnsetTimeout, true}, operation, tensors, tensors);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::recv(Tensors& tensors, int source, int tag) {
  check_root(at("recv"), source, size_);
  return receive(tensors, source, tag, OpType::RECV);
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, -1, tag, OpType::RECVANYSOURCE);
}

}  // namespace multicomm
