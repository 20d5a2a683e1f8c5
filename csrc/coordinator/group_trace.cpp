#include "coordinator/group_trace.h"

#include <utility>

#include "coordinator/coordinator.h"

namespace multicomm {
namespace {

constexpr std::chrono::seconds kLong{1};

}  // namespace

Trace* GroupTrace::trace() const { return coordinator_.trace(); }

void GroupTrace::posted(Operation& message) {
  if (Trace* t = trace()) message.trail.offered = t->now();
}

void GroupTrace::matched(Operation& message) {
  if (Trace* t = trace()) message.trail.agreed = t->now();
}

void GroupTrace::round_started(const std::deque<OperationPtr>& pending, uint32_t offered,
                               const NamedOperations& names) {
  Trace* t = trace();
  round_started_ = t == nullptr ? 0 : t->now();
  if (t == nullptr) return;
  const auto mark = [this](Operation& operation) {
    if (operation.trail.offered == 0) operation.trail.offered = round_started_;  // else in an earlier round
  };
  for (uint32_t i = 0; i < offered; ++i) mark(*pending[i]);
  names.for_each([&](const OperationPtr& operation) {
    if (operation->prepared) mark(*operation);
  });
}

void GroupTrace::round_over(const std::vector<OperationPtr>& agreed, uint32_t offered) {
  const int64_t number = rounds_++;
  Trace* t = trace();
  if (t == nullptr) return;
  const int64_t now = t->now();
  for (const OperationPtr& operation : agreed) {
    operation->trail.agreed = now;
    operation->trail.round = number;
  }
  t->round_over(group_, {number, round_started_, now, offered, static_cast<uint32_t>(agreed.size())});
}

void GroupTrace::launching(const Batch& batch) {
  Trace* t = trace();
  if (t == nullptr) return;
  const int64_t now = t->now();
  const bool message = is_point_to_point(batch.descriptor().kind);
  for (const OperationPtr& operation : batch.operations) {
    operation->trail.packing = now;
    if (message) continue;
    operation->trail.batch = static_cast<int64_t>(batch.number);
    operation->trail.fused = static_cast<uint32_t>(batch.operations.size());
  }
}

void GroupTrace::packed(const Batch& batch) {
  Trace* t = trace();
  if (t == nullptr) return;
  const int64_t now = t->now();
  for (const OperationPtr& operation : batch.operations) operation->trail.packed = now;
}

void GroupTrace::launched(const Batch& batch) {
  Trace* t = trace();
  if (t == nullptr) return;
  const int64_t now = t->now();
  for (const OperationPtr& operation : batch.operations) operation->trail.launched = now;
}

void GroupTrace::batch_over(const Batch& batch, const ErrorPtr& error) {
  Trace* t = trace();
  if (t == nullptr || is_point_to_point(batch.descriptor().kind)) return;
  BatchTrail trail{static_cast<int64_t>(batch.number), batch.operations.front().get(), 0, 0, error != nullptr};
  for (const OperationPtr& operation : batch.operations) {
    ++trail.operations;
    trail.bytes += operation->bytes();
  }
  t->batch_over(group_, trail);
}

void GroupTrace::over(const Operation& operation, const ErrorPtr& error) {
  if (Trace* t = trace()) t->operation_over(group_, operation, OperationEnd::kDone, error.get());
}

void GroupTrace::waits(Operation& operation, Operation::Clock::time_point now) {
  Trace* t = trace();
  if (t == nullptr || now - operation.submitted < kLong || std::exchange(operation.trail_waits, true)) return;
  t->operation_over(group_, operation, OperationEnd::kWaiting, nullptr);
}

void GroupTrace::unfinished(const Operation& operation) {
  if (Trace* t = trace()) t->operation_over(group_, operation, OperationEnd::kUnfinished, nullptr);
}

}  // namespace multicomm
