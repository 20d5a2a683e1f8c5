// What is brought forward by looking, besides MPI's requests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace multicomm {

// Driver only.
class Poller {
 public:
  virtual size_t poll() = 0;  // how many steps were taken; never blocks

 protected:
  ~Poller() = default;
};

// Those with something under way.
class Pollers {
 public:
  void attach(Poller& poller) { active_.push_back(&poller); }
  void detach(Poller& poller) { std::erase(active_, &poller); }
  size_t poll() {
    size_t steps = 0;
    scratch_ = active_;  // a poller may detach itself or others
    for (Poller* poller : scratch_) {
      if (std::find(active_.begin(), active_.end(), poller) != active_.end()) steps += poller->poll();
    }
    return steps;
  }

 private:
  std::vector<Poller*> active_;
  std::vector<Poller*> scratch_;
};

}  // namespace multicomm
