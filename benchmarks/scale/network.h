// The network of the scale simulation, and the schedules of its collectives.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace multicomm::scale {

using Time = int64_t;  // virtual nanoseconds

// LogGP (Alexandrov, Ionescu, Schauser, Scheiman: "LogGP: incorporating long messages into the LogP model", SPAA 1995):
// a message of k bytes occupies its sender for `send`, is under way for L + k G, and occupies its receiver for
// `receive`. No contention in the network: links and switches are never busy.
struct Network {
  Time inside = 500;    // L between ranks of one node: shared memory
  Time between = 3000;  // L between nodes
  Time send = 200;
  Time receive = 500;      // with combining what came
  double per_byte = 0.04;  // G: 25 GB/s
  int node = 8;            // ranks per node
  Time step = 300;         // of the CPU, for one step of a coordinator

  bool same_node(int a, int b) const { return a / node == b / node; }
  Time under_way(int from, int to, size_t bytes) const {
    return (same_node(from, to) ? inside : between) + static_cast<Time>(per_byte * static_cast<double>(bytes));
  }
  Time transfer(size_t bytes) const { return static_cast<Time>(per_byte * static_cast<double>(bytes)); }
};

// What one member does in step k of a collective: sends, then waits for a message. -1: nobody.
struct Step {
  int send = -1;
  int receive = -1;
  bool replace = false;  // what comes is the result; else it is combined
};

inline int ceil_log2(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }
inline int floor_log2(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }

enum class Algorithm : uint8_t { kDoubling, kBinomial, kBruck };

// All-reduce by recursive doubling, for any number of members (R. Thakur, R. Rabenseifner, W. Gropp: "Optimization of
// collective communication operations in MPICH", IJHPCA 19(1), 2005): where n is no power of two, the first 2r members
// (n = 2^m + r) pair up before and after.
inline Step doubling(int member, int n, int k) {
  const int power = 1 << floor_log2(n), rest = n - power, last = floor_log2(n) + 1;
  const bool paired = member < 2 * rest, even = member % 2 == 0;
  if (k == 0 || k == last) {
    if (!paired) return {};
    const bool sends = even == (k == 0);
    const int peer = even ? member + 1 : member - 1;
    return sends ? Step{peer, -1, false} : Step{-1, peer, k == last};
  }
  if (paired && even) return {};
  const int number = paired ? member / 2 : member - rest;
  const int other = number ^ (1 << (k - 1));
  const int peer = other < rest ? 2 * other + 1 : other + rest;
  return {peer, peer, false};
}

// All-reduce by a binomial tree up and another down, as Open MPI's libnbc does it (nbc_iallreduce.c, NBC_ARED_BINOMIAL:
// its default below 64 KiB).
inline Step binomial(int member, int n, int k) {
  const int levels = ceil_log2(n);
  if (k < levels) {
    const int bit = 1 << k;
    if (member % bit != 0) return {};
    if ((member & bit) != 0) return {member - bit, -1, false};
    return member + bit < n ? Step{-1, member + bit, false} : Step{};
  }
  const int bit = 1 << (k - levels);
  if (member < bit) return member + bit < n ? Step{member + bit, -1, false} : Step{};
  return member < 2 * bit ? Step{-1, member - bit, true} : Step{};
}

// All-gather (J. Bruck et al.: "Efficient algorithms for all-to-all communications in multiport message-passing
// systems", IEEE TPDS 8(11), 1997).
inline Step bruck(int member, int n, int k) {
  const int distance = 1 << k;
  return {(member - distance + n) % n, (member + distance) % n, true};
}

inline int steps_of(Algorithm algorithm, int n) {
  if (n == 1) return 0;
  switch (algorithm) {
    case Algorithm::kDoubling: return floor_log2(n) + 2;
    case Algorithm::kBinomial: return 2 * ceil_log2(n);
    case Algorithm::kBruck: return ceil_log2(n);
  }
  return 0;
}

inline Step step_of(Algorithm algorithm, int member, int n, int k) {
  switch (algorithm) {
    case Algorithm::kDoubling: return doubling(member, n, k);
    case Algorithm::kBinomial: return binomial(member, n, k);
    case Algorithm::kBruck: return bruck(member, n, k);
  }
  return {};
}

}  // namespace multicomm::scale
