#include "coordinator/batch.h"

#include <algorithm>

namespace multicomm {
namespace {

bool fusible(const Descriptor& d) {
  return d.kind == OpKind::kAllReduce || d.kind == OpKind::kBroadcast || d.kind == OpKind::kReduce;
}

bool same_unit(const Descriptor& a, const Descriptor& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.device == b.device;
}

uint64_t bytes_of(const Descriptor& d) { return d.count * size_of(d.dtype); }

}  // namespace

std::vector<Batch> plan_batches(const std::vector<OperationPtr>& agreed, const FusionLimits& limits) {
  struct Open {
    size_t batch;
    uint64_t bytes;
  };
  std::vector<Batch> batches;
  std::vector<Open> open;  // at most one per unit: few, so a scan beats a map
  for (const OperationPtr& operation : agreed) {
    const Descriptor& d = operation->descriptor;
    const uint64_t bytes = bytes_of(d);
    const bool fuse = limits.fuse && fusible(d) && bytes <= limits.operation_bytes;
    auto it = !fuse ? open.end() : std::find_if(open.begin(), open.end(), [&](const Open& o) {
      return same_unit(batches[o.batch].descriptor(), d);
    });
    if (it != open.end() && it->bytes + bytes <= limits.buffer_bytes) {
      batches[it->batch].operations.push_back(operation);
      it->bytes += bytes;
      continue;
    }
    batches.push_back(Batch{0, {operation}});
    if (!fuse) continue;
    const Open fresh{batches.size() - 1, bytes};
    if (it == open.end()) open.push_back(fresh);
    else *it = fresh;
  }
  return batches;
}

}  // namespace multicomm
