// What the members of one communicator share: anonymous memory that ends with the last process that has it open.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl_types.h"

namespace multicomm::tests::nccl {

inline constexpr int kMostRanks = 16;
inline constexpr size_t kStage = 256 << 10;  // bytes, per member and step of a collective
inline constexpr size_t kRing = 32 << 10;    // bytes, per ordered pair

// What a call looks like to the other members: they compare it.
struct Signature {
  int32_t kind;
  int32_t type;
  int32_t op;
  int32_t root;
  uint64_t count;
  uint64_t sequence;  // among the collectives of the communicator, or the messages of the pair

  bool operator==(const Signature&) const = default;
  std::string text() const;
};

// A signature per step, in turns in two places: who posts step s + 2 has seen that all have posted s + 1, and so have
// read s.
struct Posts {
  Signature signature[2];
  std::atomic<uint64_t> count;

  void post(uint64_t step, const Signature& what) {
    signature[step % 2] = what;
    count.store(step + 1, std::memory_order_release);
  }
  bool has(uint64_t step) const { return count.load(std::memory_order_acquire) > step; }
};

struct Member {
  std::atomic<uint32_t> claimed;
  std::atomic<uint32_t> present;
  std::atomic<uint32_t> finalized;
  char gpu[64];
  Posts steps;
  alignas(64) char stage[2][kStage];
};

// From one member to another. Bytes pass when both have posted, so that a send ends only with its receive.
struct Channel {
  Posts sends;
  Posts receives;
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char ring[kRing];
};

struct Region {
  std::atomic<uint64_t> nonce;  // the communicator's identity
  std::atomic<int32_t> ranks;
  Member member[kMostRanks];
  Channel channel[kMostRanks][kMostRanks];  // [from][to]
};

// Makes the memory; this process holds it open until `close_region`. False: the system refused.
bool create_region(ncclUniqueId* id);
// Maps it, in the creator or any other process; null: the creator has closed it or is gone, or this is no such id.
std::shared_ptr<Region> open_region(const ncclUniqueId& id);
// Any process, any number of times; what is mapped stays.
void close_region(const ncclUniqueId& id);
uint64_t nonce_of(const ncclUniqueId& id);

}  // namespace multicomm::tests::nccl
