#include "transport/mpi/buffer_pool.h"

#include <bit>
#include <utility>

namespace multicomm {

BufferPool::Block BufferPool::take(size_t bytes) {
  const auto it = free_.lower_bound(bytes);
  if (it != free_.end() && it->first <= 2 * bytes + 4096) {
    Block block = std::move(it->second);
    free_.erase(it);
    kept_ -= block.capacity;
    return block;
  }
  const size_t capacity = bytes < (size_t{1} << 20) ? std::bit_ceil(bytes + 64) : (bytes + 4095) / 4096 * 4096;
  Block block;
  block.data.reset(static_cast<std::byte*>(::operator new[](capacity, std::align_val_t{64})));
  block.capacity = capacity;
  return block;
}

void BufferPool::give(Block block) {
  if (!block) return;
  kept_ += block.capacity;
  const size_t capacity = block.capacity;
  free_.emplace(capacity, std::move(block));
  while (kept_ > kKept) {
    const auto largest = std::prev(free_.end());
    kept_ -= largest->first;
    free_.erase(largest);
  }
}

}  // namespace multicomm
