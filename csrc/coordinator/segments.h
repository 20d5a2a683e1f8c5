// How the pieces of an operation lie in memory.
#pragma once

#include <algorithm>
#include <vector>

#include "coordinator/operation.h"

namespace multicomm {

inline int64_t total_count(const std::vector<Segment>& segments) {
  int64_t total = 0;
  for (const Segment& s : segments) total += s.count;
  return total;
}

// Gives them memory from `at` on, one behind the other.
inline void place(std::vector<Segment>& segments, std::byte* at, size_t element) {
  for (Segment& s : segments) {
    s.data = at;
    at += static_cast<size_t>(s.count) * element;
  }
}

inline bool equal_counts(const std::vector<Segment>& segments) {
  return std::all_of(segments.begin(), segments.end(),
                     [&](const Segment& s) { return s.count == segments.front().count; });
}

// Whether they are one piece of memory that begins at first_of(segments). Empty ones lie anywhere.
inline bool adjacent(const std::vector<Segment>& segments, size_t element) {
  const std::byte* end = nullptr;
  for (const Segment& s : segments) {
    if (s.count == 0) continue;
    if (end != nullptr && s.data != end) return false;
    end = s.data + static_cast<size_t>(s.count) * element;
  }
  return true;
}

// The memory of the first one that is not empty; null if all are.
inline std::byte* first_of(const std::vector<Segment>& segments) {
  for (const Segment& s : segments)
    if (s.count > 0) return s.data;
  return nullptr;
}

inline bool overlap(const Segment& a, const Segment& b, size_t element) {
  return a.count > 0 && b.count > 0 && a.data < b.data + static_cast<size_t>(b.count) * element &&
         b.data < a.data + static_cast<size_t>(a.count) * element;
}

// Whether any of `some` shares memory with any of `others`.
inline bool overlap(const std::vector<Segment>& some, const std::vector<Segment>& others, size_t element) {
  return std::any_of(some.begin(), some.end(), [&](const Segment& a) {
    return std::any_of(others.begin(), others.end(), [&](const Segment& b) { return overlap(a, b, element); });
  });
}

}  // namespace multicomm
