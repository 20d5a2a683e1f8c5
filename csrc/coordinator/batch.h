// Agreed operations grouped into units for the data plane.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm {

// One launch of the data plane: one operation, or several that run as one on a fused buffer. All have the same kind,
// dtype, reduce op and root.
struct Batch {
  uint64_t number = 0;  // within the group, the same on all members
  std::vector<OperationPtr> operations;
  const Descriptor& descriptor() const { return operations.front()->descriptor; }
  bool fused() const { return operations.size() > 1; }
};

struct FusionLimits {
  bool fuse = true;          // off in deterministic mode
  uint64_t operation_bytes;  // larger operations run alone, in place
  uint64_t buffer_bytes;     // a fused buffer holds at most this much
};

// Plans batches for agreed operations. Uses their descriptors only, never local state, so that all members plan alike.
// Operations of one plan touch disjoint memory (see OverlapGuard), hence may be reordered.
std::vector<Batch> plan_batches(const std::vector<OperationPtr>& agreed, const FusionLimits& limits);

}  // namespace multicomm
