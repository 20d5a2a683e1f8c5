// What the engine tells a timeline. It knows no clock: times come from the trace.
#pragma once

#include <cstdint>

namespace multicomm {

class GroupState;
class Operation;
struct OperationError;

// When an operation changed its state, in nanoseconds of the trace's clock; 0: it has not, or no trace was there.
struct Trail {
  int64_t offered = 0;  // in a round; a message: given to its data plane
  int64_t agreed = 0;   // all members have submitted it
  int64_t packing = 0;  // handed to the data plane, which packs it
  int64_t packed = 0;   // under way
  int64_t launched = 0;
  int64_t round = -1;  // that agreed on it; -1: none
  int64_t batch = -1;  // -1: none; its data rode in the round
  uint32_t fused = 0;  // operations of its batch
};

enum class OperationEnd : uint8_t {
  kDone,        // or failed
  kWaiting,     // it is not over, and has waited for long
  kUnfinished,  // it is not over, and the trace ends
};

struct RoundTrail {
  int64_t number;
  int64_t started;  // 0: before the trace
  int64_t ended;
  uint32_t offered;  // by this rank
  uint32_t agreed;
};

struct BatchTrail {
  int64_t number;
  const Operation* first;
  uint32_t operations;
  int64_t bytes;
  bool failed;
};

// Called by the driver.
class Trace {
 public:
  virtual int64_t now() = 0;
  virtual void round_over(const GroupState& group, const RoundTrail& round) = 0;
  virtual void batch_over(const GroupState& group, const BatchTrail& batch) = 0;
  // Before the operation's result is published: who has waited for it finds it in the trace.
  virtual void operation_over(const GroupState& group, const Operation& operation, OperationEnd end,
                              const OperationError* error) = 0;

 protected:
  ~Trace() = default;
};

}  // namespace multicomm
