#include "process_group/tensor_operation.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace multicomm {
namespace {

// Beyond this many contiguous runs a tensor's memory is taken as its whole extent: it may then be ordered behind an
// operation on elements in between, but never run beside one on its own.
constexpr int64_t kMostRuns = 4096;

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i > 0 ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

}  // namespace

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::kBool;
    case at::kByte: return DType::kUint8;
    case at::kChar: return DType::kInt8;
    case at::kUInt16: return DType::kUint16;
    case at::kShort: return DType::kInt16;
    case at::kUInt32: return DType::kUint32;
    case at::kInt: return DType::kInt32;
    case at::kUInt64: return DType::kUint64;
    case at::kLong: return DType::kInt64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kComplexFloat: return DType::kComplex64;
    case at::kComplexDouble: return DType::kComplex128;
    default: break;
  }
  switch (c10::elementSize(type)) {
    case 1: return DType::kOther8;
    case 2: return DType::kOther16;
    case 4: return DType::kOther32;
    default: C10_THROW_ERROR(NotImplementedError, c10::str("multicomm: tensors of dtype ", type, " are not supported"));
  }
}

std::exception_ptr to_exception(const ErrorPtr& error) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error->message));
}

// Whether the future has what it waits for now. Under the lock.
bool WorkState::count_down(TensorOperation& operation) {
  if (std::exchange(operation.counted_for_future, true)) return false;
  // One that was given up may still be in the launcher's hands, which then writes its event.
  const bool failed = operation.done() && operation.error();
  if (!failed && operation.event && std::find(events_.begin(), events_.end(), operation.event) == events_.end())
    events_.push_back(operation.event);
  return --awaited_ == 0;
}

// What the future's users do comes behind the device's work: a stream of the pool waits for just that, and the future
// takes its place from it.
void WorkState::complete(const Completion& c) const {
  if (!c.future) return;
  if (c.error) return c.future->setError(to_exception(c.error));
  if (c.events.empty()) return c.future->markCompleted(c10::IValue(outputs_));
  try {
    const c10::Device device = c.events.front()->device();
    const c10::OptionalDeviceGuard on(device);
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStreamFromGlobalPool(device);
    for (const auto& event : c.events) event->block(stream);
    const c10::StreamGuard current(stream);
    c.future->markCompleted(c10::IValue(outputs_));
  } catch (const std::exception&) {  // of the device, which then refuses everything
    c.future->setErrorIfNeeded(std::current_exception());
  }
}

void WorkState::one_launched(TensorOperation& operation) {
  Completion whole;
  {
    const std::lock_guard lock(mutex_);
    if (count_down(operation)) whole = completion();
  }
  complete(whole);
}

void WorkState::one_done(TensorOperation& operation) {
  Completion whole;
  bool last;
  {
    const std::lock_guard lock(mutex_);
    if (operation.error() && !error_) error_ = operation.error();
    finished = std::max(finished, operation.finished());
    if (count_down(operation)) whole = completion();
    last = --remaining_ == 0;
  }
  if (last && on_done_) {
    std::exchange(on_done_, nullptr)();
    profiled_.store(false);
  }
  if (last && hook) std::exchange(hook, nullptr)(*this);
  complete(whole);
}

std::optional<std::chrono::duration<float, std::milli>> WorkState::duration() const {
  const std::lock_guard lock(mutex_);
  if (!timed || remaining_ > 0) return std::nullopt;
  return finished - started;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkState::future() {
  Completion whole;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    std::vector<c10::Device> devices;
    for (const at::Tensor& output : outputs_)
      if (!output.is_cpu() && devices.empty()) devices.push_back(output.device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (awaited_ == 0) whole = completion();
  }
  complete(whole);
  return future_;
}

TensorOperation::TensorOperation(OpKind kind, ReduceOp reduce_op, at::ScalarType dtype, int root, int shown_root)
    : scalar_type(dtype), shown_root_(shown_root) {
  descriptor.kind = kind;
  descriptor.reduce_op = reduce_op;
  descriptor.dtype = kind == OpKind::kBarrier ? DType::kUint8 : to_dtype(dtype);
  descriptor.root = root;
  // Several of torch's types share one of ours (fp8, quantised): they must not pass for each other.
  descriptor.equal_hash = mix(static_cast<uint64_t>(dtype));
}

void TensorOperation::mix_equal(uint64_t value) { descriptor.equal_hash = hash_combine(descriptor.equal_hash, value); }

void TensorOperation::mix_sizes(at::IntArrayRef sizes) {
  mix_equal(sizes.size());
  for (const int64_t size : sizes) mix_equal(static_cast<uint64_t>(size));
}

void TensorOperation::add_ranges(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return;
  const auto base = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto element = static_cast<int64_t>(tensor.element_size());
  if (tensor.is_contiguous()) {
    ranges.push_back({base, base + static_cast<uintptr_t>(tensor.numel() * element), write});
    return;
  }
  // The contiguous runs: two columns of one matrix do not overlap, though their extents do.
  int64_t run = 1;
  int64_t dim = tensor.dim() - 1;
  for (; dim >= 0 && (tensor.size(dim) == 1 || tensor.stride(dim) == run); --dim) run *= tensor.size(dim);
  const int64_t runs = tensor.numel() / run;
  if (runs > kMostRuns) {
    int64_t extent = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
    ranges.push_back({base, base + static_cast<uintptr_t>(extent * element), write});
    return;
  }
  for (int64_t i = 0; i < runs; ++i) {
    int64_t offset = 0, index = i;
    for (int64_t d = dim; d >= 0; --d) {
      offset += index % tensor.size(d) * tensor.stride(d);
      index /= tensor.size(d);
    }
    const auto begin = base + static_cast<uintptr_t>(offset * element);
    ranges.push_back({begin, begin + static_cast<uintptr_t>(run * element), write});
  }
}

void TensorOperation::add(const at::Tensor& tensor, const std::vector<int64_t>* counts, bool input, bool output) {
  if (!tensors_.empty() && tensor.device() != tensors_.front().device()) second_device_ = tensor.device();
  tensors_.push_back(tensor);
  if (!tensor.is_cpu()) {
    descriptor.device = DeviceKind::kCuda;
    device = tensor.device();
  }
  add_ranges(tensor, output);
  Staged staged{tensor, {}, inputs.size(), 0, outputs.size(), 0};
  // A lazily conjugated or negated tensor does not hold the values that it stands for.
  const bool direct = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() && !(input && factor_.defined());
  auto* data = direct && tensor.numel() > 0 ? static_cast<std::byte*>(tensor.data_ptr()) : nullptr;
  const auto append = [&](std::vector<Segment>& segments, int64_t offset, int64_t count) {
    segments.push_back(
        {data == nullptr ? nullptr : data + offset * static_cast<int64_t>(tensor.element_size()), count});
  };
  const size_t pieces = counts == nullptr ? 1 : counts->size();
  int64_t offset = 0;
  for (size_t i = 0; i < pieces; ++i) {
    const int64_t count = counts == nullptr ? tensor.numel() : (*counts)[i];
    if (input) append(inputs, offset, count);
    if (output) append(outputs, offset, count);
    offset += count;
  }
  staged.inputs = input ? pieces : 0;
  staged.outputs = output ? pieces : 0;
  if (!direct && tensor.numel() > 0) staged_.push_back(std::move(staged));
}

void TensorOperation::add_input(const at::Tensor& tensor) { add(tensor, nullptr, true, false); }
void TensorOperation::add_output(const at::Tensor& tensor) { add(tensor, nullptr, false, true); }
void TensorOperation::add_in_place(const at::Tensor& tensor) { add(tensor, nullptr, true, true); }
void TensorOperation::add_split_input(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
  add(tensor, &counts, true, false);
}
void TensorOperation::add_split_output(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
  add(tensor, &counts, false, true);
}

std::string TensorOperation::describe() const {
  std::ostringstream text;
  text << name_of(descriptor.kind);
  if (descriptor.reduce_op != ReduceOp::kNone) text << '(' << name_of(descriptor.reduce_op) << ')';
  switch (descriptor.kind) {
    case OpKind::kBarrier:
    case OpKind::kJoin: return text.str();
    case OpKind::kBroadcast:
    case OpKind::kScatter: text << " from rank " << shown_root_; break;
    case OpKind::kReduce:
    case OpKind::kGather: text << " to rank " << shown_root_; break;
    case OpKind::kSend: text << " to rank " << shown_root_ << ", tag " << tag << ','; break;
    case OpKind::kRecv:
      text << (shown_root_ < 0 ? std::string(" from any rank") : " from rank " + std::to_string(shown_root_))
           << ", tag " << tag << ',';
      break;
    default: break;
  }
  text << " of " << c10::toString(scalar_type) << ' ';
  const auto counts = [](const std::vector<Segment>& segments) {
    std::vector<int64_t> list;
    for (const Segment& s : segments) list.push_back(s.count);
    return sizes_text(list);
  };
  switch (descriptor.kind) {
    case OpKind::kAllToAll: text << "elements, sends " << counts(inputs) << ", expects " << counts(outputs); break;
    case OpKind::kAllGather:
      text << tensors_.front().sizes() << ", one such piece per rank or " << counts(outputs);
      break;
    case OpKind::kReduceScatter: text << "elements " << counts(inputs); break;
    default: text << tensors_.front().sizes(); break;
  }
  // Where some ranks have it on the CPU, this is all that differs.
  if (device) text << " on " << c10::DeviceTypeName(device->type(), true);
  return text.str();
}

void TensorOperation::prepare() {
  owns_buffers = !staged_.empty() && staged_.size() == tensors_.size();
  const at::AutoDispatchBelowADInplaceOrView guard;  // also for tensors that require grad or come from inference mode
  for (Staged& s : staged_) {
    s.buffer = s.inputs > 0
                   ? s.tensor.clone(at::MemoryFormat::Contiguous)
                   : at::empty(s.tensor.sizes(), s.tensor.options().memory_format(at::MemoryFormat::Contiguous));
    if (s.inputs > 0 && factor_.defined()) s.buffer.mul_(factor_);
    auto* const base = static_cast<std::byte*>(s.buffer.data_ptr());
    const auto place = [&](std::vector<Segment>& segments, size_t first, size_t count) {
      auto* data = base;
      for (size_t i = first; i < first + count; ++i) {
        segments[i].data = data;
        data += segments[i].count * static_cast<int64_t>(s.buffer.element_size());
      }
    };
    place(inputs, s.first_input, s.inputs);
    place(outputs, s.first_output, s.outputs);
  }
}

void TensorOperation::finish() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (Staged& s : staged_)
    if (s.outputs > 0) s.tensor.copy_(s.buffer);
  if (after_.defined()) result.mul_(after_);
}

void TensorOperation::finalize_launch() {
  if (work) work->one_launched(*this);
}

void TensorOperation::finalize() {
  if (work) work->one_done(*this);
}

}  // namespace multicomm
