#include "process_group/handle.h"

#include <algorithm>

#include "process_group/work.h"

namespace multicomm {

bool Handle::poll() const {
  return std::all_of(operations_.begin(), operations_.end(), [](const auto& o) { return o->done() || o->launched(); });
}

void Handle::wait() const { await_operations(operations_, std::chrono::milliseconds(0)); }

}  // namespace multicomm
