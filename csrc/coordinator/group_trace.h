// Where a group's operations stand, for a timeline. Without one each call costs a look at a null pointer.
#pragma once

#include <deque>
#include <vector>

#include "coordinator/batch.h"
#include "coordinator/names.h"
#include "coordinator/trace.h"

namespace multicomm {

class Coordinator;

// Owned by the driver.
class GroupTrace {
 public:
  GroupTrace(const Coordinator& coordinator, const GroupState& group) : coordinator_(coordinator), group_(group) {}

  void posted(Operation& message);
  void matched(Operation& message);  // a message between devices has both its ends
  void round_started(const std::deque<OperationPtr>& pending, uint32_t offered, const NamedOperations& names);
  void round_over(const std::vector<OperationPtr>& agreed, uint32_t offered);
  void launching(const Batch& batch);
  void packed(const Batch& batch);
  void launched(const Batch& batch);
  void batch_over(const Batch& batch, const ErrorPtr& error);
  void over(const Operation& operation, const ErrorPtr& error);
  // Once per operation that has waited for long: what never ends is to be seen, too.
  void waits(Operation& operation, Operation::Clock::time_point now);
  void unfinished(const Operation& operation);

 private:
  Trace* trace() const;

  const Coordinator& coordinator_;
  const GroupState& group_;
  int64_t rounds_ = 0;  // finished; also without a trace, so that all members count alike
  int64_t round_started_ = 0;
};

}  // namespace multicomm
