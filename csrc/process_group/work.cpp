#include "process_group/work.h"

#include <algorithm>
#include <thread>

#include "process_group/streams.h"

namespace multicomm {
namespace {

using Operations = std::vector<std::shared_ptr<TensorOperation>>;

ErrorPtr first_error_of(const Operations& operations) {
  for (const auto& operation : operations)
    if (operation->done() && operation->error()) return operation->error();
  return nullptr;
}

// What the current stream is given from now on comes behind the operations.
void make_streams_wait(const Operations& operations) {
  const c10::Event* last = nullptr;
  for (const auto& operation : operations) {
    if (!operation->event || operation->event.get() == last) continue;
    const c10::impl::VirtualGuardImpl guard(operation->device->type());
    const c10::Stream stream = guard.getStream(*operation->device);
    refuse_capture(guard, stream, "multicomm: wait()");
    operation->event->block(stream);
    last = operation->event.get();
  }
}

// Whoever has waited may stop the profiler next, and an event that ends after that is written into freed memory.
void end_profiling(const Operations& operations) {
  const auto profiled = [&] { return operations.front()->work && operations.front()->work->profiled(); };
  if (operations.empty() || !profiled()) return;
  for (const auto& operation : operations) {
    if (!operation->done()) return;  // it goes on, on a device
    if (operation->claim_finalize()) operation->finalize();
  }
  while (profiled()) std::this_thread::yield();  // the completion thread is at it
}

}  // namespace

void await_operations(const Operations& operations, std::chrono::milliseconds timeout) {
  Runtime& runtime = Runtime::get();
  const bool blocking = runtime.settings().cuda_blocking_wait;
  const auto ready = [&](const TensorOperation& o) { return o.done() || (!blocking && o.launched()); };
  auto deadline = Operation::Clock::time_point::max();
  for (const auto& operation : operations) {
    if (ready(*operation)) continue;
    if (timeout > kNoTimeout && deadline == Operation::Clock::time_point::max())
      deadline = Operation::Clock::now() + timeout;
    const bool in_time =
        runtime.driver().wait_until([&] { return ready(*operation); }, deadline, Runtime::interrupt_check());
    if (!in_time) {
      C10_THROW_ERROR(DistBackendError, c10::str("multicomm: wait() gave up after ", timeout.count(),
                                                 " ms; the operation goes on: ", operation->describe(), ", sequence ",
                                                 operation->sequence));
    }
  }
  end_profiling(operations);
  if (const ErrorPtr error = first_error_of(operations)) std::rethrow_exception(to_exception(error));
  make_streams_wait(operations);
}

MulticommWork::MulticommWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                             std::vector<std::shared_ptr<TensorOperation>> operations, std::vector<at::Tensor> outputs)
    : Work(rank, type, title, inputs),
      operations_(std::move(operations)),
      state_(std::make_shared<WorkState>(std::move(outputs), operations_.size())) {
  for (const auto& operation : operations_) operation->work = state_;
  if (recordFunctionEndCallback_) state_->profile(std::move(recordFunctionEndCallback_));
}

bool MulticommWork::done() const {
  return std::all_of(operations_.begin(), operations_.end(), [](const auto& o) { return o->done(); });
}

ErrorPtr MulticommWork::first_error() const { return first_error_of(operations_); }

bool MulticommWork::isCompleted() { return done(); }
bool MulticommWork::isSuccess() const { return done() && !first_error(); }

std::exception_ptr MulticommWork::exception() const {
  const ErrorPtr error = first_error();
  return error ? to_exception(error) : nullptr;
}

int MulticommWork::sourceRank() const { return operations_.size() == 1 ? operations_.front()->peer : -1; }

std::vector<at::Tensor> MulticommWork::result() { return state_->outputs(); }

void MulticommWork::synchronize() { wait(kNoTimeout); }

bool MulticommWork::wait(std::chrono::milliseconds timeout) {
  await_operations(operations_, timeout);
  return true;
}

void MulticommWork::abort() {
  C10_THROW_ERROR(NotImplementedError, "multicomm: Work.abort() is not supported; use abort() of the process group");
}

c10::intrusive_ptr<c10::ivalue::Future> MulticommWork::getFuture() {
  auto future = state_->future();
  Runtime::get().driver().wake();  // whoever waits for a future does not drive
  for (const auto& operation : operations_) {
    operation->want_completion();
    if (operation->launched() && operation->claim_finalize_launch()) operation->finalize_launch();
    // Done before it was wanted: nobody will come for it soon, so it is finalized here.
    if (operation->done() && operation->claim_finalize()) operation->finalize();
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> MulticommWork::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([result](c10::ivalue::Future& future) {
    const auto outcome = future.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    result->markCompleted(c10::IValue(static_cast<int64_t>(outcome)));
  });
  return result;
}

float MulticommWork::getDuration() const {
  const auto duration = state_->duration();
  TORCH_CHECK(duration.has_value(),
              "multicomm: a duration is known once the operation is done, and only where "
              "_enable_collectives_timing() was called on the group before it");
  return duration->count();
}

uint64_t MulticommWork::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.front()->sequence.load();
}

}  // namespace multicomm
