// What a batch is in terms of NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "coordinator/batch.h"
#include "transport/device/nccl_communicator.h"

namespace multicomm::device {

// How NCCL reduces a dtype: rules for bool and complex as torch's own NCCL backend has them.
struct NcclReduction {
  NcclType type;
  NcclOp op;
  size_t parts;  // of an element
};
std::optional<NcclReduction> nccl_reduction(DType dtype, ReduceOp op);
// A function of the descriptor alone, so that all members take the same way.
bool nccl_serves(const Descriptor& descriptor);

// A batch made ready on the current stream: what is copied together is copied, what is not in one piece has one.
struct NcclBatch {
  std::vector<NcclCommunicator::Call> calls;
  std::vector<at::Tensor> scratch;           // alive until the device is done
  std::vector<std::function<void()>> after;  // on the same stream, once the calls are enqueued
};
// `newer`: whether NCCL has gather and scatter of its own.
void append(NcclBatch& all, const Batch& batch, int rank, int size, c10::Device device, bool newer);

// Contiguous elements of a device as a tensor of elements of that size.
at::Tensor as_tensor(std::byte* data, int64_t count, size_t element, c10::Device device);
// Several copies as one launch, where the device has that.
void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

}  // namespace multicomm::device
