// Who is in which group: a mesh of tensor, pipeline, data and expert parallel groups.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "network.h"

namespace multicomm::scale {

enum Kind : uint8_t { kWorld, kTensor, kPipeline, kData, kExpert, kKinds };
inline constexpr const char* kKindNames[kKinds] = {"world", "tensor", "pipeline", "data", "expert"};

struct Group {
  Kind kind = kWorld;
  int number = 0;
  std::vector<int> members;
  int64_t sum = 0;  // over the members, of rank + 1
  int size() const { return static_cast<int>(members.size()); }
};

// rank = (data * pipelines + pipeline) * tensors + tensor: a tensor group is one node. Expert groups cut the data
// groups into eights.
class Mesh {
 public:
  static constexpr int kTensors = 8, kPipelines = 4, kExperts = 8;
  static constexpr int kSmallest = 2 * kTensors * kPipelines;  // and sizes are multiples of half of it

  struct Place {
    Group* group;
    int member;
  };

  explicit Mesh(int ranks) : places_(static_cast<size_t>(ranks)) {
    const int datas = ranks / (kTensors * kPipelines);
    std::vector<int> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    add(kWorld, std::move(all));
    const auto rank = [](int d, int p, int t) { return (d * kPipelines + p) * kTensors + t; };
    for (int d = 0; d < datas; ++d)
      for (int p = 0; p < kPipelines; ++p) add(kTensor, line(kTensors, [&](int t) { return rank(d, p, t); }));
    for (int d = 0; d < datas; ++d)
      for (int t = 0; t < kTensors; ++t) add(kPipeline, line(kPipelines, [&](int p) { return rank(d, p, t); }));
    for (int p = 0; p < kPipelines; ++p)
      for (int t = 0; t < kTensors; ++t) add(kData, line(datas, [&](int d) { return rank(d, p, t); }));
    for (int p = 0; p < kPipelines; ++p)
      for (int t = 0; t < kTensors; ++t)
        for (int d = 0; d < datas; d += kExperts)
          add(kExpert, line(std::min(kExperts, datas - d), [&](int e) { return rank(d + e, p, t); }));
  }

  int ranks() const { return static_cast<int>(places_.size()); }
  std::deque<Group>& groups() { return groups_; }
  const Place& place(int rank, Kind kind) const { return places_[static_cast<size_t>(rank)][kind]; }
  int largest(Kind kind) const {
    int size = 0;
    for (const Group& group : groups_)
      if (group.kind == kind) size = std::max(size, group.size());
    return size;
  }

 private:
  template <typename RankOf>
  static std::vector<int> line(int size, RankOf rank_of) {
    std::vector<int> members;
    for (int i = 0; i < size; ++i) members.push_back(rank_of(i));
    return members;
  }
  void add(Kind kind, std::vector<int> members) {
    Group& group = groups_.emplace_back(Group{kind, static_cast<int>(groups_.size()), std::move(members)});
    for (const int rank : group.members) group.sum += rank + 1;
    for (int m = 0; m < group.size(); ++m)
      places_[static_cast<size_t>(group.members[static_cast<size_t>(m)])][kind] = {&group, m};
  }

  std::deque<Group> groups_;
  std::vector<std::array<Place, kKinds>> places_;
};

}  // namespace multicomm::scale
