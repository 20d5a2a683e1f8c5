// What the ranks do: the same training-like steps under every scheme of agreement, and what is measured of them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "coordinator/types.h"
#include "events.h"
#include "mesh.h"

namespace multicomm::scale {

// One collective.
struct What {
  OpKind kind = OpKind::kAllReduce;
  uint64_t count = 0;  // elements of 8 bytes
  bool device = false;
};
inline constexpr uint64_t kSmall = 8;  // rides in the record

// How a scheme is told and tells: whoever implements it agrees on what all members have submitted.
class Scheme {
 public:
  virtual void submit(int rank, Kind kind, uint64_t sequence, const What& what, Time now) = 0;

 protected:
  ~Scheme() = default;
};

// Durations in ns, all kept.
class Samples {
 public:
  void add(Time duration) { values_.push_back(static_cast<uint32_t>(duration)); }
  void add(const Samples& others) { values_.insert(values_.end(), others.values_.begin(), others.values_.end()); }
  size_t count() const { return values_.size(); }
  // Of the values in order, the one at `share`.
  uint32_t quantile(double share);

 private:
  std::vector<uint32_t> values_;
};

// When the last member had submitted an operation, and when the last member knew that it is agreed, or launched it.
class Ledger {
 public:
  explicit Ledger(Mesh& mesh) : open_(mesh.groups().size()) {}
  void submitted(const Group& group, uint64_t sequence, bool device, Time now);
  void agreed(const Group& group, uint64_t sequence, Time now);
  void launched(const Group& group, uint64_t sequence, Time now);
  std::array<Samples, kKinds> agreement;      // from the last submission
  std::array<Samples, kKinds> device_launch;  // likewise, device operations only

 private:
  struct Entry {
    int submitted = 0, agreed = 0, launched = 0;
    bool device = false;
    Time last_submitted = 0, last_agreed = 0, last_launched = 0;
  };
  struct Open {
    std::deque<Entry> entries;
    uint64_t first = 0;  // sequence of the front
  };
  Entry& entry(const Group& group, uint64_t sequence);
  void retire(const Group& group);
  std::vector<Open> open_;  // by group
};

// Tensors are moved in a time that depends on their size alone, once all members have come. A rank's device takes one
// batch after the other, in launch order, and each blocks it until all members' devices have come to it.
class DataModel final : Handler {
 public:
  DataModel(Mesh& mesh, Events& events, const Network& network)
      : events_(events), network_(network), host_(mesh.groups().size()), device_(mesh.groups().size()) {
    streams_.resize(static_cast<size_t>(mesh.ranks()));
  }
  struct Done {
    Handler* handler;
    uint64_t what;
    void* with;
  };
  // `number`: the same on all members.
  void launch(const Group& group, int rank, uint64_t number, bool device, size_t bytes, Time now, Done done);

 private:
  struct Meeting {
    std::vector<Done> done;
    std::vector<int> ranks;
    uint64_t check = 0;
  };
  struct OnDevice {
    const Group* group;
    uint64_t number;
    size_t bytes;
    Done done;
  };
  using Meetings = std::vector<std::unordered_map<uint64_t, Meeting>>;  // by group, by number
  void happen(Time now, uint64_t rank, void* done) override;            // a device's head is over
  void begin(int rank, Time now);
  Time duration(const Group& group, size_t bytes) const;

  Events& events_;
  const Network network_;
  Meetings host_, device_;
  std::vector<std::deque<OnDevice>> streams_;
};

// The ranks' programs: computing with random skew, submitting, waiting.
class Programs final : Handler {
 public:
  Programs(Mesh& mesh, Events& events, Ledger& ledger, int steps, uint64_t seed);
  void start(Scheme& scheme);
  void done(int rank, Time now);  // one operation of the rank
  bool finished() const { return left_ == 0; }
  Time end() const { return end_; }
  static std::array<int, kKinds> operations_per_step();

 private:
  struct Rank {
    uint64_t random;
    uint32_t at = 0;
    int steps = 0;
    int outstanding = 0;
    bool waits = false;
    std::array<uint64_t, kKinds> sequence{};
  };
  void happen(Time now, uint64_t rank, void*) override { go_on(static_cast<int>(rank), now); }
  void go_on(int rank, Time now);
  void submit(int rank, size_t action, Time now);

  Mesh& mesh_;
  Events& events_;
  Ledger& ledger_;
  Scheme* scheme_ = nullptr;
  std::vector<Rank> ranks_;
  int left_;
  Time end_ = 0;
};

}  // namespace multicomm::scale
