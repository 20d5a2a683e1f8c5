// What the ranks of a group compare before an operation runs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "coordinator/types.h"

namespace multicomm {

// In Descriptor::count: the pieces differ in size; their list is part of the hash.
inline constexpr uint64_t kUneven = UINT64_MAX;

// Plain data: it travels inside a record, between processes of one build.
struct Descriptor {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp reduce_op = ReduceOp::kNone;
  DeviceKind device = DeviceKind::kCpu;
  int32_t root = -1;  // group rank, -1 where the operation has none
  // Elements that every rank brings, by the operation's own rule: the tensor of all_reduce, broadcast, reduce;
  // one rank's piece of all_gather, reduce_scatter, gather, scatter when all pieces are equal, else kUneven; 0 for
  // all_to_all, whose pieces are nobody's but the pair's.
  uint64_t count = 0;
  uint64_t equal_hash = 0;  // of everything else that must be equal: shapes, lists of sizes, wire format
  // Whatever must fit together without being equal: summed over the ranks (modulo 2^64) it gives 0.
  uint64_t checksum = 0;

  bool agrees_with(const Descriptor& other) const {
    return kind == other.kind && dtype == other.dtype && reduce_op == other.reduce_op && device == other.device &&
           root == other.root && count == other.count && equal_hash == other.equal_hash;
  }
};
static_assert(std::is_trivially_copyable_v<Descriptor> && sizeof(Descriptor) == 32);

// SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t hash_combine(uint64_t seed, uint64_t value) { return mix(seed ^ mix(value)); }

}  // namespace multicomm
