// A simulated accelerator: torch's PrivateUse1 in host memory, with streams that really run beside the host. With it,
// code that keeps to c10's device-generic interface is tested without a GPU. tests/device/simulated.py loads it.
//
// A stream is a thread that runs its tasks one after the other, and waits for nothing but the events that it was told
// to wait for: what misses an event reads what is not there yet. Memory is freed as by CUDA's caching allocator, in the
// order of the stream that it was allocated on, and poisoned then: what another stream still does with it goes wrong.
//
//   SIM_DEVICES=n   devices (8)
//   SIM_DELAY_US=n  sleep 0 to n microseconds before each task (0)
//   SIM_SEED=n      of those sleeps (1)
//
// What it cannot show: real kernels, their launch failures and their numerics (all operations but the few below run on
// the CPU, in host time, after the current stream's earlier work); PCIe and peer access (any thread can read all memory
// at any time); how copy engines and multiprocessors share a GPU (tasks of different streams always overlap, none waits
// for resources); CUDA's own rules (what is forbidden during capture, across forks and between contexts, sticky errors,
// the legacy default stream's implicit synchronisation).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime.h"
#include "stream.h"

namespace multicomm::tests {
namespace {

// ---------------------------------------------------------------------------------------- what c10 asks of a device

template <bool pinned>
class SimAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const auto device = pinned ? c10::Device(c10::kCPU) : c10::Device(kSim, current_device);
    if (size == 0) return {nullptr, device};
    auto* block =
        pinned ? memory().allocate(size, -1, {}) : memory().allocate(size, current_device, {&current_stream(device)});
    return {block->data, block, [](void* context) { memory().release(static_cast<Block*>(context)); }, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

c10::Allocator* device_allocator() {
  static auto* allocator = new SimAllocator<false>;
  return allocator;
}

const bool allocator_set = (c10::SetAllocator(kSim, device_allocator()), true);

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(Device device) const override {
    state_of(device.index());  // that there is one
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }

  Stream getStream(Device device) const override { return make(device, current_streams[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return make(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    const auto turn = state_of(index_of(device)).next[high_priority]++;
    return make(device, 1 + high_priority * kPool + turn % kPool);
  }
  Stream getNewStream(Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    stream_of(stream);  // that there is one
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return static_cast<DeviceStream*>(&stream_of(stream));
  }
  bool queryStream(const Stream& stream) const override { return stream_of(stream).idle(); }
  void synchronizeStream(const Stream& stream) const override { stream_of(stream).synchronize(); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (auto& stream : state_of(device).streams) stream->synchronize();
  }
  bool isStreamCapturing(const Stream& stream) const override { return stream_of(stream).capturing; }

  void record(void** event, const Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of another device");
    if (!*event) *event = new SimEvent;
    std::lock_guard lock(event_of(*event).mutex);
    event_of(*event).moment = record_on(stream_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) block_on(stream_of(stream), event_of(event).latest());
  }
  bool queryEvent(void* event) const override {
    return !event || event_of(event).latest().wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronizeEvent(void* event) const override {
    if (event) event_of(event).latest().wait();
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto elapsed = event_of(to).latest().get() - event_of(from).latest().get();
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<SimEvent*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    memory().add_stream(data.get(), &stream_of(stream));
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }  // all types

 private:
  static Stream make(Device device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(kSim, index_of(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimHooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return device_count(); }
  Index getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(Index device) const override { SimGuard().setDevice({kSim, device}); }
  Index exchangeDevice(Index device) const override { return SimGuard().exchangeDevice({kSim, device}).index(); }
  Index maybeExchangeDevice(Index device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }

  // Random operations run on the CPU and draw from its generator.
  const at::Generator& getDefaultGenerator(Index) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(Index) const override { return at::make_generator<at::CPUGeneratorImpl>(); }

  bool isPinnedPtr(const void* data) const override { return memory().device_of(data) == c10::DeviceIndex{-1}; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new SimAllocator<true>;
    return allocator;
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto device = memory().device_of(data);
    TORCH_CHECK(device && *device >= 0, "not memory of a simulated device");
    return {kSim, *device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    current_stream(storage.device()).synchronize();
    auto data = storage.allocator()->allocate(size);
    if (size && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

const bool hooks_set = (at::RegisterPrivateUse1HooksInterface(new SimHooks), true);

// ------------------------------------------------------------------------------------------------------- operations

// The same memory as a CPU tensor, for a stream's task. It keeps the storage alive, not the tensor, which may belong to
// a Python object: a task that lets go of one would wait for the interpreter's lock, whose holder may wait for the
// task.
at::Tensor as_cpu(const at::Tensor& tensor, bool written) {
  void* data = written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  auto alias = at::from_blob(
      data, tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {},
      at::TensorOptions(tensor.scalar_type()));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void check_overlap(const at::Tensor& written, const at::Tensor& read) {  // a task has no one to tell of it
  at::assert_no_internal_overlap(written);
  if (written.device() == read.device()) at::assert_no_partial_overlap(written, read);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_overlap(to, from);
  if (to.numel() == 0) return to;
  auto copy = [to = as_cpu(to, true), from = as_cpu(from, false).expand(to.sizes())] { to.copy_(from); };
  if (from.device() != to.device() && !from.is_cpu() && !to.is_cpu()) {  // both current streams stand around it
    auto &source = current_stream(from.device()), &target = current_stream(to.device());
    block_on(source, record_on(target));
    source.submit(std::move(copy));
    block_on(target, record_on(source));
    return to;
  }
  auto& stream = current_stream(from.is_cpu() ? to.device() : from.device());
  stream.submit(std::move(copy));
  const auto waits = [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && !(non_blocking && memory().device_of(tensor.const_data_ptr()) == c10::DeviceIndex{-1});
  };
  if (waits(from) || waits(to)) stream.synchronize();
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  current_stream(self.device()).synchronize();  // what grows is moved by the host
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(self.cpu()); }

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  at::assert_no_internal_overlap(self);
  if (self.numel()) current_stream(self.device()).submit([to = as_cpu(self, true), value] { to.fill_(value); });
  return self;
}

at::Tensor& zero_(at::Tensor& self) { return multicomm::tests::fill_(self, 0); }

void record_stream(at::Tensor& self, c10::Stream stream) {
  memory().add_stream(self.storage().data(), &stream_of(stream));
}

// Its copies from and to the device wait for the current streams, as a kernel runs after what was launched before.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

// What add and mul do on the stream: two tensors of one device, shape and type, or a tensor and a number of its type.
bool on_stream(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  const auto type = self.scalar_type();
  const bool plain = at::isFloatingType(type) || (at::isIntegralType(type, false) && alpha.isIntegral(false));
  if (!plain || self.device().type() != kSim) return false;
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) return at::result_type(self, other) == type;
  return other.device() == self.device() && other.sizes() == self.sizes() && other.scalar_type() == type;
}

template <class Operation>
void run_binary(const at::Tensor& to, const at::Tensor& self, const at::Tensor& other, Operation operation) {
  check_overlap(to, self);
  check_overlap(to, other);
  const auto number = other.unsafeGetTensorImpl()->is_wrapped_number();
  const auto right = number ? at::native::wrapped_scalar_tensor(other.item()) : as_cpu(other, false);
  current_stream(to.device()).submit([to = as_cpu(to, true), left = as_cpu(self, false), right, operation]() mutable {
    operation(to, left, right);
  });
}

auto adding(const at::Scalar& alpha) {
  return
      [alpha](at::Tensor& to, const at::Tensor& left, const at::Tensor& right) { at::add_out(to, left, right, alpha); };
}

void multiply(at::Tensor& to, const at::Tensor& left, const at::Tensor& right) { at::mul_out(to, left, right); }

at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!on_stream(self, other, alpha))
    return at::native::call_fallback_fn<&fallback, at::_ops::add_Tensor>::call(self, other, alpha);
  auto to = at::empty_like(self);
  run_binary(to, self, other, adding(alpha));
  return to;
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!on_stream(self, other, alpha))
    return at::native::call_fallback_fn<&fallback, at::_ops::add__Tensor>::call(self, other, alpha);
  run_binary(self, self, other, adding(alpha));
  return self;
}

at::Tensor mul(const at::Tensor& self, const at::Tensor& other) {
  if (!on_stream(self, other, 1))
    return at::native::call_fallback_fn<&fallback, at::_ops::mul_Tensor>::call(self, other);
  auto to = at::empty_like(self);
  run_binary(to, self, other, multiply);
  return to;
}

at::Tensor& mul_(at::Tensor& self, const at::Tensor& other) {
  if (!on_stream(self, other, 1))
    return at::native::call_fallback_fn<&fallback, at::_ops::mul__Tensor>::call(self, other);
  run_binary(self, self, other, multiply);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", add_);
  m.impl("mul.Tensor", mul);
  m.impl("mul_.Tensor", mul_);
  // Views: only sizes and strides.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// Nothing is cast.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The copy resolves these itself; what would resolve them first copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// --------------------------------------------------------------------------------------- what simulated.py calls

// The stream goes no further until the gate is opened.
extern "C" void* sim_block(int device, int64_t stream) {
  auto* gate = new std::promise<Clock::time_point>;
  block_on(stream_of(static_cast<c10::DeviceIndex>(device), stream), gate->get_future().share());
  return gate;
}

// Once per gate.
extern "C" void sim_open(void* gate) {
  auto* promise = static_cast<std::promise<Clock::time_point>*>(gate);
  promise->set_value(Clock::now());
  delete promise;
}

extern "C" void sim_set_capturing(int device, int64_t stream, bool on) {
  stream_of(static_cast<c10::DeviceIndex>(device), stream).capturing = on;
}

extern "C" bool sim_in_bad_fork() { return bad_fork; }

// Before the libraries' own ends: tasks would use what is destroyed there.
extern "C" void sim_stop() {
  stopping = true;
  const auto deadline = Clock::now() + std::chrono::milliseconds(200);
  for (c10::DeviceIndex device = 0; device < device_count(); ++device)
    for (auto& stream : state_of(device).streams) stream->settle(deadline);
}

}  // namespace multicomm::tests
