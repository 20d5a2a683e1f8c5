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
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "stream.h"

namespace multicomm::tests {
namespace {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kPool = 32;                // streams per device and priority, handed out in turn
constexpr int kStreams = 1 + 2 * kPool;  // id 0 is the default stream; then those of usual and of high priority
constexpr int kPoison = 0xFB;            // a byte; simulated.py names it too

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtol(value, nullptr, 10) : otherwise;
}

c10::DeviceIndex device_count() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("SIM_DEVICES", 8));
  return count;
}

std::atomic<bool> any_started{false};  // a stream's thread exists
std::atomic<bool> bad_fork{false};     // this process was forked from one where such threads existed: it has none
std::atomic<bool> stopping{false};     // the process ends: no further task begins

// ---------------------------------------------------------------------------------------------------------- streams

// All members may be called by any thread. Never destroyed: its thread, begun by the first task, runs until the end.
class SimStream : public DeviceStream {
 public:
  SimStream(int device, int id) : DeviceStream{&SimStream::enqueue_raw}, device_(device), id_(id) {}

  void submit(Task task) {
    TORCH_CHECK(!bad_fork, "the simulated device cannot be used in a forked process");
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = any_started = true;
      std::thread([this] { work(); }).detach();
    }
    queue_.push_back(std::move(task));
    ++submitted_;
    changed_.notify_all();
  }

  // For what has been submitted so far, not for what others submit meanwhile.
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, upto = submitted_] { return completed_ >= upto; });
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return completed_ == submitted_;
  }

  // `stopping` is set: until the task in flight is over, or for a while (it may wait for what never comes).
  void settle(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [this] { return !running_; });
  }

  std::atomic<bool> capturing{false};

 private:
  static void enqueue_raw(DeviceStream* self, void (*run)(void*), void* argument) {
    static_cast<SimStream*>(self)->submit([run, argument] { run(argument); });
  }

  void work() {
    const long delay = setting("SIM_DELAY_US", 0);
    std::mt19937_64 random(setting("SIM_SEED", 1) * 1'000'003 + device_ * kStreams + id_);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty() && !stopping; });
      Task task = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (delay + 1)));
      task();
      task = nullptr;  // what it kept alive is gone before anyone sees it completed
      lock.lock();
      running_ = false;
      ++completed_;
      changed_.notify_all();
    }
  }

  const int device_, id_;
  std::mutex mutex_;  // protects all below
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t submitted_ = 0, completed_ = 0;
  bool started_ = false, running_ = false;
};

struct DeviceState {
  explicit DeviceState(int device) {
    for (int id = 0; id < kStreams; ++id) streams.push_back(std::make_unique<SimStream>(device, id));
  }
  std::vector<std::unique_ptr<SimStream>> streams;
  std::array<std::atomic<unsigned>, 2> next{};                           // by priority
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();  // random operations run on the CPU
};

DeviceState& state_of(c10::DeviceIndex device) {
  static auto& devices = *[] {
    auto* made = new std::vector<std::unique_ptr<DeviceState>>;  // leaked: the threads outlive static destructors
    for (int device = 0; device < device_count(); ++device) made->push_back(std::make_unique<DeviceState>(device));
    pthread_atfork(nullptr, nullptr, [] { bad_fork = any_started.load(); });
    return made;
  }();
  TORCH_CHECK(device >= 0 && device < device_count(), "no simulated device ", int{device});
  return *devices[device];
}

SimStream& stream_of(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id < kStreams, "no stream ", id, " of a simulated device");
  return *state_of(device).streams[id];
}

SimStream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

SimStream& current_stream(c10::Device device) {
  const auto current = current_streams.find(index_of(device));
  return stream_of(index_of(device), current == current_streams.end() ? 0 : current->second);
}

// ----------------------------------------------------------------------------------------------------------- events

using Moment = std::shared_future<Clock::time_point>;  // when the stream came there

Moment record_on(SimStream& stream) {
  auto reached = std::make_shared<std::promise<Clock::time_point>>();
  Moment moment = reached->get_future().share();
  stream.submit([reached] { reached->set_value(Clock::now()); });
  return moment;
}

void block_on(SimStream& stream, const Moment& moment) {
  stream.submit([moment] { moment.wait(); });
}

// One version of an event is one Moment; recording again replaces it and leaves who waits for the earlier alone.
struct SimEvent {
  Moment latest() {
    std::lock_guard lock(mutex);
    return moment;
  }
  std::mutex mutex;
  Moment moment;  // under mutex
};

SimEvent& event_of(void* event) { return *static_cast<SimEvent*>(event); }

// ----------------------------------------------------------------------------------------------------------- memory

struct Block {
  char* data;
  size_t size;
  c10::DeviceIndex device;          // -1: pinned memory of the host
  std::vector<SimStream*> streams;  // pass before it is freed: that it was allocated on, those recorded; Memory's lock
};

// Device memory and pinned memory, all of it in the host's. Any thread. Freed memory is poisoned and rests for some
// time before it goes back to the system, so that late readers and writers meet poison, and no one else's data.
class Memory {
 public:
  Block* allocate(size_t size, c10::DeviceIndex device, std::vector<SimStream*> streams) {
    constexpr size_t kAlignment = 512;
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    TORCH_CHECK(data, "no memory for ", size, " bytes of the simulated device");
    std::memset(data, kPoison, rounded);
    auto* block = new Block{data, rounded, device, std::move(streams)};
    std::lock_guard lock(mutex_);
    live_.emplace(data, block);
    return block;
  }

  // The host lets go of it; the streams may still be on their way.
  void release(Block* block) {
    {
      std::lock_guard lock(mutex_);
      live_.erase(block->data);
    }
    if (bad_fork) return;  // the parent's streams do not run here
    std::shared_ptr<Block> last(block, [this](Block* freed) { rest(freed); });
    for (auto* stream : block->streams)
      if (!stream->idle()) stream->submit([last] {});
  }

  void add_stream(const void* data, SimStream* stream) {
    std::lock_guard lock(mutex_);
    Block* block = find(data);
    if (block && std::find(block->streams.begin(), block->streams.end(), stream) == block->streams.end())
      block->streams.push_back(stream);
  }

  std::optional<c10::DeviceIndex> device_of(const void* data) {
    std::lock_guard lock(mutex_);
    Block* block = find(data);
    return block ? std::optional(block->device) : std::nullopt;
  }

 private:
  Block* find(const void* data) {
    auto after = live_.upper_bound(static_cast<const char*>(data));
    if (after == live_.begin()) return nullptr;
    Block* block = std::prev(after)->second;
    return data < block->data + block->size ? block : nullptr;
  }

  void rest(Block* block) {
    constexpr size_t kMost = 64 << 20;
    std::memset(block->data, kPoison, block->size);
    std::lock_guard lock(mutex_);
    resting_.emplace_back(block);
    resting_bytes_ += block->size;
    for (; resting_bytes_ > kMost; resting_.pop_front()) {
      resting_bytes_ -= resting_.front()->size;
      std::free(resting_.front()->data);
    }
  }

  std::mutex mutex_;  // protects all below
  std::map<const char*, Block*> live_;
  std::deque<std::unique_ptr<Block>> resting_;  // the oldest first
  size_t resting_bytes_ = 0;
};

Memory& memory() {
  static auto& memory = *new Memory;
  return memory;
}

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

// ---------------------------------------------------------------------------------------- what c10 asks of a device

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

  Stream getStream(Device device) const override {
    const auto current = current_streams.find(index_of(device));
    return make(device, current == current_streams.end() ? 0 : current->second);
  }
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

  const at::Generator& getDefaultGenerator(Index device) const override {
    return state_of(device < 0 ? current_device : device).generator;
  }
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
