// Memory that the members of a group on one node share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace multicomm::shm {

inline constexpr size_t kSlots = 4;                      // chunks that a rank may be ahead of the slowest
inline constexpr size_t kSlotBytes = size_t{256} << 10;  // a chunk stays in the cache between its steps

// One member's part: how far it is, and the chunks it has published. Counters only grow; each is written by its owner
// and read by all, on a cache line of its own.
struct Part {
  alignas(64) std::atomic<uint64_t> published;  // chunks whose contribution lies in the slots
  alignas(64) std::atomic<uint64_t> reduced;    // chunks whose own share of the result lies in the slots
  alignas(64) std::atomic<uint64_t> consumed;   // chunks of which nothing will be read any more
  alignas(4096) std::byte slots[kSlots][kSlotBytes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters must work between processes");

// An anonymous memory file of one process, mapped by the others through /proc: it has no name that could be left
// behind, and is not bounded by the size of /dev/shm.
class Segment {
 public:
  struct Address {
    int64_t pid;
    int64_t descriptor;
  };

  // Made by the group's first member; the others open its address, while the first still holds the descriptor.
  static std::unique_ptr<Segment> create(size_t members);
  static std::unique_ptr<Segment> open(const Address& address, size_t members);  // null when it cannot be opened
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Address address() const;
  void close_descriptor();  // once everybody has mapped it
  Part& part(size_t member) { return parts_[member]; }

 private:
  Segment(int descriptor, Part* parts, size_t members) : descriptor_(descriptor), parts_(parts), members_(members) {}
  static std::unique_ptr<Segment> map(int descriptor, size_t members);

  int descriptor_;
  Part* parts_;
  size_t members_;
};

}  // namespace multicomm::shm
