#include "process_group/process_group.h"

#include <cstdio>
#include <utility>

#include "process_group/store_adapter.h"

namespace multicomm {
namespace {

constexpr std::chrono::seconds kLeaveBound{3};

[[noreturn]] void not_there(const char* what) {
  C10_THROW_ERROR(NotImplementedError, std::string("multicomm: ") + what + " is not supported");
}

}  // namespace

ProcessGroupMulticomm::ProcessGroupMulticomm(const GroupDescription& d,
                                             const c10::intrusive_ptr<MulticommOptions>& options)
    : Backend(d.rank, d.size), options_(options) {
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

void ProcessGroupMulticomm::setTimeout(std::chrono::milliseconds timeout) { options_->timeout = timeout; }
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

void ProcessGroupMulticomm::monitoredBarrier(const c10d::BarrierOptions&, bool) { not_there("monitored_barrier"); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::split(const c10::intrusive_ptr<c10d::Store>&,
                                                               const std::vector<int>&,
                                                               const c10::intrusive_ptr<Options>&) {
  not_there("split_group");
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::merge(const c10::intrusive_ptr<c10d::Store>&,
                                                               const c10::intrusive_ptr<Options>&, const int&,
                                                               const int&) {
  not_there("merging groups");
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMulticomm::shrink(const std::vector<int64_t>&, int,
                                                                const c10::intrusive_ptr<Options>&) {
  not_there("shrink_group");
}

void ProcessGroupMulticomm::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&&) {
  not_there("a completion hook");
}

void ProcessGroupMulticomm::enableCollectivesTiming() { not_there("timing of collectives"); }

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

ProcessGroupMulticomm::WorkPtr ProcessGroupMulticomm::submit(const Call& call,
                                                             std::vector<TensorOperationPtr> operations,
                                                             const Tensors& inputs, Tensors outputs) {
  {
    const std::lock_guard lock(mutex_);
    if (coalescing_) {
      // Numbered and sent at endCoalescing; the Work returned there stands for all of them.
      coalesced_.insert(coalesced_.end(), operations.begin(), operations.end());
      coalesced_outputs_.insert(coalesced_outputs_.end(), outputs.begin(), outputs.end());
      return nullptr;
    }
  }
  Runtime& runtime = Runtime::get();
  const auto timeout = call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout;
  const auto deadline = Operation::Clock::now() + timeout;
  for (const auto& operation : operations) operation->deadline = deadline;
  auto work = c10::make_intrusive<MulticommWork>(rank_, call.type, call.title, inputs, std::move(operations),
                                                 std::move(outputs));
  for (const auto& operation : work->operations()) runtime.coordinator().submit(group_, operation);
  // A synchronous caller waits right away and drives by itself: waking the thread would only take its core.
  if (call.async) runtime.driver().wake();
  runtime.driver().pace();
  return work;
}

}  // namespace multicomm
