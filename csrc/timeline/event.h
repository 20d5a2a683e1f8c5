// What the driver hands to the timeline's writer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/trace.h"
#include "coordinator/types.h"

namespace multicomm::timeline {

// Texts are rare, and would make every event larger.
struct Texts {
  std::string name;         // of the operation or the group
  std::string error;        // of the operation
  std::string description;  // of the group: what its maker calls it
  std::vector<int> ranks;   // of the group
  uint64_t identity = 0;    // of the group; 0: not known yet
};

struct Event {
  enum class What : uint8_t { kGroup, kRound, kBatch, kOperation };
  What what = What::kOperation;
  OperationEnd end = OperationEnd::kDone;
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp reduce_op = ReduceOp::kNone;
  DeviceKind device = DeviceKind::kCpu;
  bool failed = false;
  uint64_t group = 0;
  int32_t other = -1;  // global rank: the root, or the other end of a message
  int32_t tag = 0;
  uint32_t operations = 0;  // offered in the round, or of the batch
  uint32_t agreed = 0;      // in the round
  uint64_t sequence = 0;
  int64_t bytes = 0;
  int64_t begun = 0;
  int64_t ended = 0;
  Trail trail;
  std::unique_ptr<Texts> texts;
};

}  // namespace multicomm::timeline
