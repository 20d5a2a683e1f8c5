#include "process_group/join_operation.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

#include "coordinator/reduce_kernels.h"
#include "coordinator/segments.h"
#include "coordinator/stand_in.h"

namespace multicomm {
namespace {

std::byte* memory_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<std::byte*>(tensor.data_ptr());
}

// As StandIn, in the device's memory: the planes of devices write what comes, also where nobody wants it.
class DeviceStandIn final : public TensorOperation {
 public:
  DeviceStandIn(const Descriptor& agreed, c10::Device on, int group_size)
      : TensorOperation(agreed.kind, agreed.reduce_op, at::kByte, agreed.root, agreed.root) {
    lay_out_stand_in(*this, agreed, group_size);
    device = on;
    prepared = true;  // its plane does so
  }
  std::string describe() const override {
    return std::string(name_of(descriptor.kind)) + " on a device, in which this rank brings nothing";
  }
  void prepare() override {
    const size_t element = size_of(descriptor.dtype);
    const int64_t total = total_count(inputs);
    const at::Tensor identity = at::empty({total * static_cast<int64_t>(element)}, at::kByte);
    if (total > 0) fill_identity(descriptor.dtype, descriptor.reduce_op, identity.mutable_data_ptr<uint8_t>(), total);
    brought_ = identity.to(*device);
    place(inputs, memory_of(brought_), element);
    if (outputs.empty()) return;
    if (descriptor.kind == OpKind::kAllReduce) {
      outputs = inputs;
      return;
    }
    dropped_ = at::empty({outputs.front().count * static_cast<int64_t>(element)},
                         at::TensorOptions(at::kByte).device(*device));
    place(outputs, memory_of(dropped_), element);
  }

 private:
  at::Tensor brought_, dropped_;
};

}  // namespace

std::optional<c10::Device> current_device() {
  for (const c10::DeviceType type : {c10::DeviceType::CUDA, c10::DeviceType::PrivateUse1}) {
    if (!c10::impl::hasDeviceGuardImpl(type)) continue;
    const c10::impl::VirtualGuardImpl guard(type);
    if (guard.deviceCount() > 0) return guard.getDevice();
  }
  return std::nullopt;
}

JoinOperation::JoinOperation(std::optional<c10::Device> device)
    : TensorOperation(OpKind::kJoin, ReduceOp::kNone, at::kByte, -1, -1), device_(device) {
  joined_at = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::shared_ptr<Operation> JoinOperation::stand_in(const Descriptor& agreed, int group_size) const {
  if (!device_) return nullptr;
  return std::make_shared<DeviceStandIn>(agreed, *device_, group_size);
}

}  // namespace multicomm
