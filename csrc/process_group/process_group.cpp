#include "process_group/process_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "process_group/profiling.h"
#include "process_group/store_adapter.h"
#include "process_group/streams.h"
#include "transport/device/nccl_calls.h"

namespace multicomm {
namespace {

constexpr std::chrono::seconds kLeaveBound{2};

constexpr std::chrono::seconds kAnswerGrace{3};  // beyond the time-out, for what rank 0 says then
constexpr int kShrinkAbort = 1;                  // torch.distributed's SHRINK_ABORT

// Tags of our own, one per barrier, so that a rank that comes late for one does not pass for another.
int monitored_barrier_tag(int number) { return -2 - number % (1 << 30); }

}  // namespace

ProcessGroupMulticomm::ProcessGroupMulticomm(const GroupDescription& d,
                                             const c10::intrusive_ptr<MulticommOptions>& options)
    : Backend(d.rank, d.size), description_(d), options_(options), timeout_(options->timeout) {
  bootstrap::check_launcher(d.world_rank, d.world_size);
  GroupInfo info;
  info.name = d.name;
  info.ranks = d.global_ranks;
  info.rank = d.rank;
  mpi::GroupRequest request;
  request.world.store = adapt_base_store(d.store);
  request.world.rank = d.world_rank;
  request.world.world_size = d.world_size;
  request.world.timeout = options->timeout;
  request.world.server_executable = d.server_executable;
  request.ranks = d.global_ranks;
  request.rank = d.rank;
  request.timeout = options->timeout;
  group_ = Runtime::get().make_group(std::move(info), std::move(request));
}

ProcessGroupMulticomm::~ProcessGroupMulticomm() {
  try {
    leave(std::chrono::milliseconds(0));  // the GIL may be held, which a callback of a pending operation may need
  } catch (const std::exception& error) {
    std::fprintf(stderr, "multicomm: %s\n", error.what());
  }
}

int ProcessGroupMulticomm::global_rank(int64_t rank) const {
  const auto& ranks = group_->info().ranks;
  return rank >= 0 && rank < static_cast<int64_t>(ranks.size()) ? ranks[static_cast<size_t>(rank)]
                                                                : static_cast<int>(rank);
}

void ProcessGroupMulticomm::setTimeout(std::chrono::milliseconds timeout) {
  timeout_.store(timeout);
  Runtime::get().set_timeout(group_, timeout);
}
c10::intrusive_ptr<ProcessGroupMulticomm::Options> ProcessGroupMulticomm::getBackendOptions() {
  auto options = c10::make_intrusive<MulticommOptions>(*options_);
  options->timeout = timeout_.load();
  return options;
}
uint64_t ProcessGroupMulticomm::getSequenceNumberForGroup() { return group_->sequence(); }

c10d::ErrorType ProcessGroupMulticomm::getError() {
  const ErrorPtr failure = group_->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return failure->kind == ErrorKind::kTimeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupMulticomm::abort() { Runtime::get().abort_group(group_, "abort() was called"); }

void ProcessGroupMulticomm::shutdown() { leave(kLeaveBound); }

void ProcessGroupMulticomm::leave(std::chrono::milliseconds bound) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(shut_down_, true)) return;
  }
  if (Runtime* runtime = Runtime::if_made()) runtime->leave_group(group_, bound);
}

ProcessGroupMulticomm::TensorOperationPtr ProcessGroupMulticomm::message(OpKind kind, const at::Tensor& tensor,
                                                                         int peer, int tag) {
  auto operation = make(kind, ReduceOp::kNone, tensor.scalar_type(), peer);
  operation->peer = peer;
  operation->tag = tag;
  if (kind == OpKind::kSend) operation->add_input(tensor);
  else operation->add_output(tensor);
  operation->submitted = Operation::Clock::now();
  operation->own_deadline = true;  // whoever waits for it withdraws it
  Runtime::get().coordinator().submit(group_, operation);
  return operation;
}

// Waits until the message is there; one that does not come is withdrawn, and the group goes on.
void ProcessGroupMulticomm::finish_in_time(const TensorOperationPtr& operation, Operation::Clock::time_point deadline) {
  Runtime& runtime = Runtime::get();
  if (runtime.driver().wait_until([&] { return operation->done(); }, deadline, Runtime::interrupt_check())) return;
  runtime.coordinator().post([group = group_, operation] { group->withdraw(operation); });
  runtime.driver().wait_until([&] { return operation->done(); }, Operation::Clock::time_point::max());
}

void ProcessGroupMulticomm::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? timeout_.load() : opts.timeout;
  const auto deadline = Operation::Clock::now() + timeout;
  const int tag = monitored_barrier_tag(monitored_barriers_.fetch_add(1));
  const Where where = at("monitored_barrier");
  if (rank_ != 0) {
    at::Tensor missing = at::empty({size_}, at::kByte);
    const auto answer = message(OpKind::kRecv, missing, 0, tag);
    message(OpKind::kSend, at::empty({0}, at::kByte), 0, tag);
    finish_in_time(answer, deadline + kAnswerGrace);
    if (const ErrorPtr failure = group_->failure()) std::rethrow_exception(to_exception(failure));
    if (answer->error()) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(where, ": rank ", global_rank(0), " did not answer within ", timeout.count(),
                               " ms: it has not called it, or gave up before. ", answer->error()->message));
    }
    report_missing(where, missing, timeout);
    return;
  }
  std::vector<TensorOperationPtr> arrivals;
  for (int peer = 1; peer < size_; ++peer)
    arrivals.push_back(message(OpKind::kRecv, at::empty({0}, at::kByte), peer, tag));
  at::Tensor missing = at::zeros({size_}, at::kByte);
  auto* flags = missing.mutable_data_ptr<uint8_t>();
  bool wait = true;
  for (int peer = 1; peer < size_; ++peer) {
    const auto& arrival = arrivals[static_cast<size_t>(peer - 1)];
    // Without wait_all_ranks the first that is missing ends it; the rest is only taken back.
    finish_in_time(arrival, wait ? deadline : Operation::Clock::now());
    if (!wait || !arrival->error()) continue;
    flags[peer] = 1;
    wait = wait_all_ranks;
  }
  if (const ErrorPtr failure = group_->failure()) std::rethrow_exception(to_exception(failure));
  // Who came is told; who did not is told as well, for when he comes.
  std::vector<TensorOperationPtr> answers;
  for (int peer = 1; peer < size_; ++peer) answers.push_back(message(OpKind::kSend, missing, peer, tag));
  for (const auto& answer : answers)
    finish_in_time(answer, Operation::Clock::now() + kAnswerGrace);  // on its way before this rank may end
  report_missing(where, missing, timeout);
}

void ProcessGroupMulticomm::report_missing(const Where& where, const at::Tensor& missing,
                                           std::chrono::milliseconds timeout) const {
  std::string names;
  for (int peer = 0; peer < size_; ++peer) {
    if (missing.const_data_ptr<uint8_t>()[peer] == 0) continue;
    names += (names.empty() ? "" : ", ") + std::to_string(global_rank(peer));
  }
  if (names.empty()) return;
  C10_THROW_ERROR(DistBackendError, c10::str(where, ": rank ", names, " did not come within ", timeout.count(),
                                             " ms. The group can be used further."));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::derive(const c10::intrusive_ptr<c10d::Store>& store,
                                                                std::vector<int> global_ranks, int rank,
                                                                const std::string& name,
                                                                const c10::intrusive_ptr<Options>& opts) const {
  GroupDescription d = description_;
  d.store = store;
  d.rank = rank;
  d.size = static_cast<int>(global_ranks.size());
  d.global_ranks = std::move(global_ranks);
  d.name = name;
  return c10::make_intrusive<ProcessGroupMulticomm>(
      d, c10::make_intrusive<MulticommOptions>(opts ? opts->timeout : timeout_.load()));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                               const std::vector<int>& ranks,
                                                               const c10::intrusive_ptr<Options>& opts) {
  std::vector<int> members;
  int own = -1;
  for (const int r : ranks) {
    check_root(at("split_group"), r, size_);
    if (r == rank_) own = static_cast<int>(members.size());
    members.push_back(global_rank(r));
  }
  if (own < 0) return nullptr;
  return derive(store, std::move(members), own, opts && !opts->group_name.empty() ? opts->group_name : "split", opts);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                                int shrink_flags,
                                                                const c10::intrusive_ptr<Options>& opts_override) {
  const auto excluded = [&](int r) {
    return std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), r) != ranks_to_exclude.end();
  };
  for (const int64_t r : ranks_to_exclude) check_root(at("shrink_group"), r, size_);
  TORCH_CHECK_VALUE(!excluded(rank_), at("shrink_group"), ": this rank is among those to be excluded");
  std::vector<int> members;
  int own = -1;
  for (int r = 0; r < size_; ++r) {
    if (excluded(r)) continue;
    if (r == rank_) own = static_cast<int>(members.size());
    members.push_back(global_rank(r));
  }
  if ((shrink_flags & kShrinkAbort) != 0) abort();
  return derive(description_.store, std::move(members), own, description_.name + ":shrunk", opts_override);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                               const c10::intrusive_ptr<Options>& opts, const int& rank,
                                                               const int& size) {
  const auto key = [](int r) { return "multicomm/merge/" + std::to_string(r); };
  const std::string own = std::to_string(description_.world_rank);
  store->set(key(rank), std::vector<uint8_t>(own.begin(), own.end()));
  std::vector<int> members;
  for (int r = 0; r < size; ++r) {
    store->wait({key(r)}, opts ? opts->timeout : timeout_.load());
    const std::vector<uint8_t> text = store->get(key(r));
    members.push_back(std::stoi(std::string(text.begin(), text.end())));
  }
  return derive(store, std::move(members), rank, opts && !opts->group_name.empty() ? opts->group_name : "merged", opts);
}

void ProcessGroupMulticomm::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, at("register_on_completion_hook"), ": this group has a hook already");
  TORCH_CHECK(group_->sequence() == 0, at("register_on_completion_hook"), ": must come before the first operation");
  onCompletionHook_ = std::move(hook);
  // One copy for all works: copying a hook of Python's counts references, which needs the GIL.
  hook_ = std::make_shared<const Hook>(onCompletionHook_);
  timing_.store(true);
}

void ProcessGroupMulticomm::waitForPendingWorks() {
  std::unique_lock lock(pending_->mutex);
  // The operations have deadlines of their own; the hook's run after them cannot be bounded.
  pending_->none.wait(lock, [this] { return pending_->count == 0; });
}

// Arranges what is to happen when the Work is done; before its operations are submitted.
void ProcessGroupMulticomm::observe(WorkState& state, const Call& call,
                                    const std::vector<TensorOperationPtr>& operations) {
  if (!timing_.load(std::memory_order_relaxed)) return;
  state.timed = true;
  state.started = Operation::Clock::now();
  for (const auto& operation : operations) operation->timed = true;
  if (hook_ == nullptr || operations.empty()) return;
  for (const auto& operation : operations) operation->want_completion();
  {
    const std::lock_guard lock(pending_->mutex);
    ++pending_->count;
  }
  state.hook = [hook = hook_, pending = pending_, type = call.type,
                sequence = group_->sequence()](const WorkState& done) {
    const std::chrono::duration<float> active = done.finished - done.started;
    try {
      (*hook)(std::make_shared<c10d::WorkInfo>(type, sequence, done.started, done.finished, active));
    } catch (const std::exception& error) {  // of the user's code, on a thread where nobody could catch it
      std::fprintf(stderr, "multicomm: a completion hook has failed: %s\n", error.what());
    }
    const std::lock_guard lock(pending->mutex);
    if (--pending->count == 0) pending->none.notify_all();
  };
}

void ProcessGroupMulticomm::startCoalescing() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!coalescing_, "multicomm: startCoalescing inside a coalesced block");
  coalescing_ = true;
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::endCoalescing() {
  std::vector<TensorOperationPtr> operations;
  Tensors outputs;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(coalescing_, "multicomm: endCoalescing without startCoalescing");
    coalescing_ = false;
    operations = std::exchange(coalesced_, {});
    outputs = std::exchange(coalesced_outputs_, {});
  }
  return submit({c10d::OpType::COALESCED, "multicomm:coalesced", c10d::kUnsetTimeout, true}, std::move(operations), {},
                std::move(outputs));
}

// Of one call, and of one group in one process, all tensors are on one device (or on the CPU): the communicators are
// that device's.
void ProcessGroupMulticomm::check_device(const TensorOperation& operation, const char* title) {
  if (!operation.device && !operation.second_device()) return;
  const char* const colon = std::strchr(title, ':');
  const Where where = at(colon == nullptr ? title : colon + 1);
  TORCH_CHECK_VALUE(!operation.second_device(), where, ": its tensors are on ", operation.first_device(), " and on ",
                    operation.second_device().value_or(c10::Device(c10::kCPU)), "; move them to one device");
  int bound = -1;
  const int index = operation.device->index();
  const bool fits = device_.compare_exchange_strong(bound, index) || bound == index;
  TORCH_CHECK_VALUE(fits, where, " of tensors on ", *operation.device, ": the first tensors of this group were on ",
                    c10::Device(operation.device->type(), static_cast<c10::DeviceIndex>(bound)),
                    "; a process moves those of one device in a group: call torch.cuda.set_device() first, or use "
                    "another group");
  const CudaMode mode = Runtime::get().settings().cuda;
  const Descriptor& d = operation.descriptor;
  TORCH_CHECK_NOT_IMPLEMENTED(mode != CudaMode::kNccl || device::nccl_serves(d), where, ": NCCL has no ",
                              name_of(d.reduce_op), " of ", operation.scalar_type,
                              "; MULTICOMM_CUDA=auto moves such tensors through host memory");
  TORCH_CHECK_VALUE(!is_point_to_point(d.kind) || operation.peer != rank_, where,
                    ": between devices a rank sends nothing to itself; use copy_()");
}

// What the current stream has been given before the call is done before the tensors are touched.
void ProcessGroupMulticomm::follow_streams(const std::vector<TensorOperationPtr>& operations) {
  std::shared_ptr<c10::Event> ready;
  std::optional<c10::Stream> stream;
  for (const auto& operation : operations) {
    if (!operation->device) continue;
    if (!ready) {
      const c10::impl::VirtualGuardImpl guard(operation->device->type());
      stream = guard.getStream(*operation->device);
      refuse_capture(guard, *stream, at("a collective"));
      ready = make_event(*operation->device);
      ready->record(*stream);
    }
    operation->ready = ready;
  }
}

// Checks, and gives the operations what they carry along: the place in their streams, the time.
void ProcessGroupMulticomm::admit(const std::vector<TensorOperationPtr>& operations, const char* title,
                                  std::chrono::milliseconds timeout) {
  // torch tells the name that its maker gave the group only after it has made it.
  if (!described_.load(std::memory_order_relaxed) && !described_.exchange(true))
    Runtime::get().describe_group(group_, getGroupDesc());
  for (const auto& operation : operations) check_device(*operation, title);
  follow_streams(operations);
  const auto now = Operation::Clock::now();
  const bool own = timeout != c10d::kUnsetTimeout;
  const auto deadline = now + (own ? timeout : timeout_.load());
  for (const auto& operation : operations) {
    operation->submitted = now;
    operation->own_deadline = own;
    operation->deadline = deadline;
  }
}

void ProcessGroupMulticomm::release(const std::vector<TensorOperationPtr>& operations, bool wake) {
  Runtime& runtime = Runtime::get();
  if (operations.size() == 1) {
    runtime.coordinator().submit(group_, operations.front());
  } else {
    const std::vector<OperationPtr> together(operations.begin(), operations.end());
    runtime.coordinator().submit(group_, together);
  }
  if (wake) runtime.driver().wake();
  runtime.driver().pace();
}

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::submit(const Call& call,
                                                             std::vector<TensorOperationPtr> operations,
                                                             const Tensors& inputs, Tensors outputs) {
  {
    const std::lock_guard lock(mutex_);
    if (coalescing_) {
      for (const auto& operation : operations) check_device(*operation, call.title);
      // Numbered and sent at endCoalescing; the Work returned there stands for all of them.
      coalesced_.insert(coalesced_.end(), operations.begin(), operations.end());
      coalesced_outputs_.insert(coalesced_outputs_.end(), outputs.begin(), outputs.end());
      return nullptr;
    }
  }
  admit(operations, call.title, call.timeout);
  auto work = c10::make_intrusive<MulticommWork>(rank_, call.type, call.title, inputs, std::move(operations),
                                                 std::move(outputs));
  observe(work->state(), call, work->operations());
  const ProfilerRecord record(work->operations());
  // A synchronous caller waits right away and drives by itself: waking the thread would only take its core.
  release(work->operations(), call.async);
  if (record.wanted()) {
    record.submitted(
        {call.title, call.async, getGroupUid(), getGroupDesc(), group_->info(), inputs, work->state().outputs()},
        *work->operations().front());
  }
  return work;
}

}  // namespace multicomm
