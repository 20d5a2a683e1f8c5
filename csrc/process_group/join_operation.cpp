#include "process_group/join_operation.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

#include "coordinator/reduce_kernels.h"

namespace multicomm {
namespace {

// As StandIn, in the device's memory: the planes of devices write what comes, also where nobody wants it.
class DeviceStandIn final : public TensorOperation {
 public:
  DeviceStandIn(const Descriptor& agreed, c10::Device on, int group_size)
      : TensorOperation(agreed.kind, agreed.reduce_op, at::kByte, agreed.root, agreed.root) {
    descriptor = agreed;
    device = on;
    abandoned = true;  // nobody waits for it
    owns_buffers = true;
    prepared = true;  // its plane does so
    const auto count = static_cast<int64_t>(agreed.count);
    if (agreed.kind == OpKind::kReduceScatter) inputs.assign(static_cast<size_t>(group_size), {nullptr, count});
    else if (is_reduction(agreed.kind)) inputs = {{nullptr, count}};
    if (agreed.kind != OpKind::kReduce) outputs = {{nullptr, count}};
  }
  std::string describe() const override {
    return std::string(name_of(descriptor.kind)) + " on a device, in which this rank brings nothing";
  }
  void prepare() override {
    const size_t element = size_of(descriptor.dtype);
    int64_t total = 0;
    for (const Segment& s : inputs) total += s.count;
    const at::Tensor identity = at::empty({total * static_cast<int64_t>(element)}, at::kByte);
    if (total > 0) fill_identity(descriptor.dtype, descriptor.reduce_op, identity.mutable_data_ptr<uint8_t>(), total);
    brought_ = identity.to(*device);
    place(inputs, brought_, element);
    if (outputs.empty()) return;
    if (descriptor.kind == OpKind::kAllReduce) {
      outputs = inputs;
      return;
    }
    dropped_ = at::empty({outputs.front().count * static_cast<int64_t>(element)},
                         at::TensorOptions(at::kByte).device(*device));
    place(outputs, dropped_, element);
  }

 private:
  static void place(std::vector<Segment>& segments, const at::Tensor& memory, size_t element) {
    auto* at = memory.numel() == 0 ? nullptr : static_cast<std::byte*>(memory.data_ptr());
    for (Segment& s : segments) {
      s.data = at;
      if (at != nullptr) at += static_cast<size_t>(s.count) * element;
    }
  }
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
