// Staging memory, kept for reuse: fresh pages cost more than the copy they are for.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <new>

namespace multicomm {

// A block belongs to the batch that took it. An empty pool allocates: launching never waits for a buffer, since two
// ranks could hold each other's. Driver only.
class BufferPool {
 public:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  struct Block {
    std::unique_ptr<std::byte[], Free> data;
    size_t capacity = 0;
    explicit operator bool() const { return data != nullptr; }
  };

  Block take(size_t bytes);
  void give(Block block);

 private:
  static constexpr size_t kKept = size_t{256} << 20;  // bytes kept at most
  std::multimap<size_t, Block> free_;
  size_t kept_ = 0;
};

}  // namespace multicomm
