// Events in Chrome's trace format: a process per rank, in it lanes per group.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "timeline/event.h"
#include "timeline/json.h"

namespace multicomm::timeline {

// Who writes; clocks are told apart and set against each other by it.
struct Origin {
  int rank = 0;
  int world_size = 0;
  std::string place;  // "host a, pid 12"
};

// The first event of a file.
std::string origin_event(const Origin& origin);

// Turns events into objects, each given to `emit`. The writer's.
class ChromeTrace {
 public:
  using Emit = std::function<void(std::string_view)>;
  ChromeTrace(int rank, Emit emit);
  void write(const Event& event);
  void lost(uint64_t events, int64_t now);

 private:
  // Slices of one lane nest or follow each other; what overlaps goes to another lane of the same kind.
  enum class LaneKind : uint8_t { kRounds, kBatches, kOperations, kMessages };
  static constexpr size_t kLaneKinds = 4;
  struct Lanes {
    std::queue<std::pair<int64_t, int>> free;  // since when; in this order, since events come as they end
    int count = 0;
  };
  struct Group {
    uint64_t number = 0;
    std::string args;     // how the arguments of all its events begin
    std::string members;  // "ranks 0-3"
    std::string title;
    Lanes lanes[kLaneKinds];
  };

  void learn(const Event& event);
  int lane(Group& group, LaneKind kind, int64_t begin, int64_t end);
  Json& head(const char* phase, const char* category, int lane, int64_t begin);
  void operation(const Event& event, Group& group);
  void states(const Event& event);
  void batch(const Event& event, Group& group);
  void round(const Event& event, Group& group);
  void finish();

  const int rank_;
  const Emit emit_;
  int next_lane_ = 1;
  std::map<uint64_t, Group> groups_;
  Json json_;
};

}  // namespace multicomm::timeline
