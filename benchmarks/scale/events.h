// Virtual time: what happens, when, to whom.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "network.h"

namespace multicomm::scale {

class Handler {
 public:
  virtual void happen(Time now, uint64_t what, void* with) = 0;

 protected:
  ~Handler() = default;
};

class Events {
 public:
  void at(Time time, Handler& handler, uint64_t what = 0, void* with = nullptr) {
    queue_.push({time, next_++, &handler, what, with});
  }
  bool empty() const { return queue_.empty(); }
  Time now() const { return now_; }
  uint64_t count() const { return next_; }
  // Until nothing is left, or until nothing before `limit` is.
  void run(Time limit = INT64_MAX) {
    while (!queue_.empty() && queue_.top().time <= limit) {
      const Event event = queue_.top();
      queue_.pop();
      now_ = event.time;
      event.handler->happen(event.time, event.what, event.with);
    }
  }

 private:
  struct Event {
    Time time;
    uint64_t order;  // of what happens at the same time: a run repeats exactly
    Handler* handler;
    uint64_t what;
    void* with;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
  uint64_t next_ = 0;
  Time now_ = 0;
};

// The time up to which each rank's communication thread is busy: messages, steps and sends take it one after the other.
class Cpus {
 public:
  explicit Cpus(int ranks) : free_(static_cast<size_t>(ranks)) {}
  Time free(int rank) const { return free_[static_cast<size_t>(rank)]; }
  // Takes `cost`, from `now` or from when the rank is free; returns the end.
  Time take(int rank, Time now, Time cost) {
    Time& free = free_[static_cast<size_t>(rank)];
    return free = std::max(free, now) + cost;
  }

 private:
  std::vector<Time> free_;
};

}  // namespace multicomm::scale
